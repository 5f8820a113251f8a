#!/usr/bin/env node
// The dashboard in a real browser: one line per case, `ok NAME` or `FAILED NAME: why`.
//
// Usage: OPENAI_API_KEY=KEY dashboard.mjs BASE_URL MODEL FOLDER
//
// BASE_URL serves MODEL and asks for KEY; FOLDER has the packages of package.json here in
// node_modules. Chromium is /usr/bin/chromium. Where PACELINE_BINARY and PACELINE_MODEL (a GGUF
// file) are set, two nodes of a cluster with a hub of their own are started, too: see actions.mjs.
// An empty BASE_URL runs that part only. SHOTS=FOLDER keeps pictures of all views, widths and
// colours. With PACELINE_TEST_LONG the page's work is measured for 60 s, else for 20 s.
// Ends with 1 when a case failed. `cargo xtask sdk` runs this.

import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { actions, hostile, tasks, WIDTHS } from "./actions.mjs";
import { startHub } from "./hub.mjs";
import { CHROMIUM, PATIENCE_MS, up } from "./nodes.mjs";

const [url, , folder] = process.argv.slice(2);
const load = createRequire(resolve(folder, "package.json"));
const { chromium } = load("playwright-core");
const axe = readFileSync(load.resolve("axe-core/axe.min.js"), "utf8");
const { OPENAI_API_KEY: KEY, PACELINE_BINARY: BINARY, PACELINE_MODEL: MODEL, SHOTS, PACELINE_TEST_LONG: LONG } = process.env;
const WENT_WITHIN_MS = 3_000;

const browser = await chromium.launch(CHROMIUM);
let failed = false;

async function run(name, action) {
  try {
    await action();
    console.log(`ok ${name}`);
  } catch (error) {
    failed = true;
    console.log(`FAILED ${name}: ${String(error.message).replaceAll("\n", " ").slice(0, 400)}`);
  }
}

function check(holds, what) {
  if (!holds) throw new Error(what);
}

/** A page at `at`, whose errors and requests to others are collected. */
async function open(at, { width = 1280, height = 1000, scheme = "light", bypassCSP = false } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, bypassCSP });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  page.wrong = [];
  page.on("console", (line) => {
    if (line.type() === "error" && !line.text().startsWith("Failed to load resource")) page.wrong.push(line.text());
  });
  page.on("response", (response) => {
    // 400 has a reason for people, 401 asks for the key, 503 is of a model that is not ready yet.
    if (response.status() >= 400 && ![400, 401, 503].includes(response.status())) page.wrong.push(`${response.status()} of ${response.url()}`);
  });
  page.on("pageerror", (error) => page.wrong.push(error.message));
  page.on("request", (request) => {
    if (!request.url().startsWith(new URL(at).origin) && !/^(data|blob):/.test(request.url())) page.wrong.push(request.url());
  });
  await page.goto(at);
  return page;
}

async function logIn(page, key) {
  await page.locator("#login[open]").waitFor();
  await page.fill("#key", key);
  await page.press("#key", "Enter");
  await page.locator("#link.good").waitFor();
}

async function oneNode() {
  const page = await open(url);
  await run("dashboard: asks for a key and takes it", () => logIn(page, KEY));
  await run("dashboard: shows the model, its shards and this machine", async () => {
    await page.click("nav >> text=Models");
    await page.locator("#instances .pill.good").waitFor();
    check((await page.locator("#instances .shards span").count()) === 2, "two shards are expected");
    await page.click("nav >> text=Machines");
    await page.locator("#nodes li").first().waitFor();
    await page.getByText("CPU", { exact: true }).first().waitFor();
  });
  await run("dashboard: no error in the console and no other server", () => check(page.wrong.length === 0, page.wrong.join("; ")));
  await page.context().close(); // its renderer would be counted with the next page's
}

/** Each view: nothing serious for axe where `judged`, nothing cut, and its picture. */
async function looks(at, width, scheme, judged) {
  const page = await open(at, { width, scheme, bypassCSP: true }); // axe is run inside the page
  await page.locator("#link.good").waitFor();
  for (const view of ["chat", "models", "machines", "activity"]) {
    await page.click(`nav a[href="#${view}"]`);
    await page.waitForFunction((name) => !document.getElementById(`view-${name}`).hidden, view);
    if (view === "models") await page.locator("#found li").first().waitFor();
    if (view === "machines") await page.locator("#nodes li").nth(1).waitFor();
    const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    check(over <= 0, `${view} is ${over} px too wide`);
    if (judged) {
      if (!(await page.evaluate(() => Boolean(window.axe)))) await page.evaluate(axe);
      const { violations } = await page.evaluate(() => window.axe.run());
      check(violations.length === 0, violations.map(({ id, nodes }) => `${view}: ${id} at ${nodes[0].target}`).join("; "));
    }
    if (SHOTS) {
      mkdirSync(SHOTS, { recursive: true });
      await page.screenshot({ path: join(SHOTS, `${view}-${width}-${scheme}.png`), fullPage: view !== "chat" });
    }
  }
  check(page.wrong.length === 0, page.wrong.join("; "));
  await page.context().close();
}

/** A long day's events, then a busy minute's: the page's memory stays flat, its work small. */
async function manyEvents() {
  const page = await open(`${url}/#activity`);
  await logIn(page, KEY);
  const devtools = await page.context().newCDPSession(page);
  await devtools.send("Performance.enable", { timeDomain: "threadTicks" });
  const heap = async () => {
    await devtools.send("HeapProfiler.collectGarbage");
    return (await devtools.send("Runtime.getHeapUsage")).usedSize / 1e6;
  };
  const busy = async () => {
    const { metrics } = await devtools.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "TaskDuration").value;
  };
  /** CPU seconds of all renderer processes, with all their threads. */
  const whole = await browser.newBrowserCDPSession();
  const rendered = async () => {
    const { processInfo } = await whole.send("SystemInfo.getProcessInfo");
    const renderers = processInfo.filter(({ type }) => type === "renderer");
    check(renderers.length > 0, "the browser tells of no renderer");
    return renderers.reduce((sum, { cpuTime }) => sum + cpuTime, 0);
  };
  let seq = 1e6;
  const replay = async (count, perSecond) => {
    const first = seq;
    seq += count;
    await page.evaluate(async ([first, count, perSecond]) => {
      const { hearEvent } = await import("/assets/paceline.js");
      const kinds = [
        { kind: "request_started", model: "tiny", prompt_tokens: 12 }, { kind: "first_token", ttft_s: 0.25 },
        { kind: "request_ended", model: "tiny", outcome: "complete", tokens: 80, tok_s: 31.5 },
        { kind: "instance", id: "1", model: "tiny", state: "ready", nodes: ["one", "two"] },
      ];
      const begun = performance.now();
      for (let sent = 0; sent < count;) {
        const due = Math.min(count, Math.floor((performance.now() - begun) / 1000 * perSecond));
        for (; sent < due; sent += 1) {
          hearEvent({ seq: first + sent, unix_ms: Date.now(), request: sent, ...kinds[sent % kinds.length] });
        }
        await new Promise((done) => setTimeout(done, 20));
      }
    }, [first, count, perSecond]);
  };
  await run("dashboard: 180,000 events at 100 x: 50 MB of heap at most, and flat", async () => {
    await replay(60_000, 5_000);
    const third = await heap();
    await replay(120_000, 5_000);
    const whole = await heap();
    console.error(`heap ${third.toFixed(1)} MB after 60,000 events, ${whole.toFixed(1)} MB after 180,000`);
    check(whole <= 50, `${whole.toFixed(1)} MB`);
    check(whole - third <= 2, `it grew from ${third.toFixed(1)} to ${whole.toFixed(1)} MB`);
    check((await page.locator("#events li").count()) === 200, "200 rows are kept");
  });
  const seconds = LONG ? 60 : 20;
  await run(`dashboard: ${seconds} s of 50 events a second: 10 % of a core at most`, async () => {
    // Other programs make the same work take more time of a core, which is not so in every window.
    let least = Infinity;
    for (let left = 3; left > 0 && least > 0.1; left -= 1) {
      const begun = performance.now();
      const [thread, before] = [await busy(), await rendered()];
      await replay(50 * seconds, 50);
      const [ownCpu, cpu] = [(await busy()) - thread, (await rendered()) - before];
      const took = (performance.now() - begun) / 1000, share = cpu / took, own = ownCpu / took;
      console.error(`the renderer used ${(share * 100).toFixed(1)} % of a core in ${took.toFixed(1)} s, the page's thread ${(own * 100).toFixed(1)} %`);
      least = Math.min(least, share);
    }
    check(least <= 0.1, `${(least * 100).toFixed(1)} %`);
  });
  await page.context().close();
}

async function cluster() {
  const homes = ["one", "two"].map(() => mkdtempSync(join(tmpdir(), "dash-")));
  const hub = await startHub(MODEL);
  const started = await Promise.allSettled(homes.map((home, at) => up(BINARY, home, ["one", "two"][at], { HF_ENDPOINT: hub.url })));
  const nodes = started.filter(({ value }) => value).map(({ value }) => value);
  try {
    for (const { reason } of started) if (reason) throw reason;
    await drive(nodes, hub);
  } finally {
    hub.close();
    for (const { child } of nodes) child.kill("SIGTERM");
    await new Promise((done) => setTimeout(done, 500));
    for (const { child } of nodes) child.kill("SIGKILL");
    for (const home of homes) rmSync(home, { recursive: true, force: true });
  }
}

async function drive([one, two], hub) {
  await run("dashboard: a node is paired by one page's code in the other's page", async () => {
    const page = await open(`${one.url}/#machines`);
    await page.click("#invite");
    const code = await page.locator("#code b").textContent();
    const other = await open(`${two.url}/#machines`);
    await other.click("#join summary");
    await other.fill("#join [name=code]", code);
    await other.fill("#join [name=peer]", `127.0.0.1:${one.port}`);
    await other.press("#join [name=peer]", "Enter");
    await other.locator("#join-said", { hasText: "in cluster" }).waitFor();
    check(other.wrong.length === 0, other.wrong.join("; "));
    await other.context().close();
    await page.locator("#nodes li").nth(1).waitFor();
    // The other's telemetry comes over the cluster.
    await page.locator("#nodes li").nth(1).getByText("Memory", { exact: true }).waitFor();
    await page.click("#links-fold summary");
    await page.locator("#links li", { hasText: /one to two.* ms/ }).waitFor();
    await page.waitForFunction(() => [...document.querySelectorAll("#map text.way")].some((label) => label.textContent.endsWith(" ms")));
    await page.context().close();
  });
  for (const [at, width] of WIDTHS.entries()) {
    const page = await open(one.url, { width, height: width < 500 ? 844 : 900 });
    page.on("dialog", (dialog) => dialog.accept());
    hub.drip();
    let done = 0;
    for (const [name, act] of actions({ first: at === 0 })) {
      await run(`dashboard: ${width} px: ${name}`, () => act(page));
      done += 1;
    }
    await run(`dashboard: ${width} px: ${done} actions without an error in the console`, () => check(page.wrong.length === 0, page.wrong.join("; ")));
    await page.context().close();
  }
  const page = await open(one.url, { width: 390, height: 844 });
  for (const [name, act] of tasks(page, one.url)) await run(`dashboard: three clicks: ${name}`, act);
  await page.context().close();
  for (const width of WIDTHS) for (const scheme of ["light", "dark"]) {
    const judged = (width === 768) === (scheme === "light"); // each width once, both colours
    if (judged || SHOTS) await run(`dashboard: ${width} px, ${scheme}: nothing for axe, nothing cut`, () => looks(one.url, width, scheme, judged));
  }
  await run("dashboard: a chat of 200 hostile messages: nothing runs, a frame takes 50 ms at most", async () => hostile(await open(one.url), SHOTS));
  await run(`dashboard: a killed node is told within ${WENT_WITHIN_MS} ms`, async () => {
    const watcher = await open(`${one.url}/#activity`);
    await watcher.locator("#link.good").waitFor();
    const killed = Date.now();
    two.child.kill("SIGKILL");
    await watcher.locator("#events li.bad, #events li.warn", { hasText: "two" }).first().waitFor({ timeout: 20_000 });
    const took = Date.now() - killed;
    check(took <= WENT_WITHIN_MS, `it took ${took} ms`);
  });
}

if (url) {
  await oneNode();
  await manyEvents();
}
if (BINARY && MODEL) await run("dashboard: the cluster ends", cluster);
await browser.close();
process.exit(failed ? 1 : 0);
