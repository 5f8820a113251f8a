#!/usr/bin/env node
// The dashboard in a real browser: one line per case, `ok NAME` or `FAILED NAME: why`.
//
// Usage: OPENAI_API_KEY=KEY dashboard.mjs BASE_URL MODEL FOLDER
//
// BASE_URL serves MODEL and asks for KEY; FOLDER has the packages of package.json here in
// node_modules. Chromium is /usr/bin/chromium. Where PACELINE_BINARY and PACELINE_MODEL (a GGUF
// file) are set, two nodes of a cluster are started, too: the page pairs them, loads and unloads a
// model, and tells of a node that is killed. SHOTS=FOLDER keeps pictures. With PACELINE_TEST_LONG
// the page's work is measured for 60 s, else for 20 s.
// Ends with 1 when a case failed. `cargo xtask sdk` runs this.

import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
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
    // Chromium reports the 401 that asks for the key as an error of its own.
    if (line.type() === "error" && !line.text().includes("401")) page.wrong.push(line.text());
  });
  page.on("pageerror", (error) => page.wrong.push(error.message));
  page.on("request", (request) => {
    if (!request.url().startsWith(at) && !request.url().startsWith("data:")) page.wrong.push(request.url());
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

async function chat(page, words) {
  await page.fill("#say", words);
  await page.press("#say", "Enter");
}

async function oneNode() {
  const page = await open(url);
  await run("dashboard: asks for a key and takes it", () => logIn(page, KEY));
  await run("dashboard: shows the model, its shards and this machine", async () => {
    await page.locator("#instances .pill.good").waitFor();
    check((await page.locator("#instances .shards span").count()) === 2, "two shards are expected");
    check((await page.locator("#nodes li").count()) >= 1, "no machine is shown");
    await page.getByText("CPU", { exact: true }).first().waitFor();
  });
  await run("dashboard: a chat streams, and its request is told", async () => {
    await chat(page, "Name three colours of the rainbow.");
    await page.waitForFunction(() => document.querySelector("#talk .assistant")?.textContent.length > 0);
    await page.locator("#chat-said:not(:empty)").waitFor();
    await page.locator("#events b", { hasText: "complete" }).first().waitFor();
  });
  await run("dashboard: an answer is stopped", async () => {
    await page.click("#chat-clear");
    await chat(page, "Write a very long story about the sea.");
    await page.waitForFunction(() => document.querySelector("#talk .assistant")?.textContent.length > 0);
    await page.click("#stop");
    await page.locator("#send:not([hidden])").waitFor();
    await page.locator("#events b", { hasText: "stopped" }).first().waitFor();
  });
  await run("dashboard: no error in the console and no other server", () => check(page.wrong.length === 0, page.wrong.join("; ")));
  for (const [width, scheme] of [[390, "light"], [1280, "dark"], [2560, "light"]]) {
    await run(`dashboard: ${width} px, ${scheme}: nothing serious for axe, nothing cut`, () => looks(url, width, scheme, KEY));
  }
  await page.context().close(); // its renderer would be counted with the next page's
}

async function looks(at, width, scheme, key) {
  const page = await open(at, { width, scheme, bypassCSP: true }); // axe is run inside the page
  if (key) await logIn(page, key);
  await page.locator("#nodes li").first().waitFor();
  const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  check(over <= 0, `the page is ${over} px too wide`);
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run());
  const serious = found.violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  check(serious.length === 0, serious.map(({ id, nodes }) => `${id} at ${nodes[0].target}`).join("; "));
  if (SHOTS) {
    mkdirSync(SHOTS, { recursive: true });
    await page.screenshot({ path: join(SHOTS, `${new URL(at).port}-${width}-${scheme}.png`), fullPage: true });
  }
  await page.context().close();
}

/** A long day's events, then a busy minute's: the page's memory stays flat, its work small. */
async function manyEvents() {
  const page = await open(url);
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
    await page.evaluate(([first, count, perSecond]) => new Promise((done) => {
      const kinds = [
        { kind: "request_started", model: "tiny", prompt_tokens: 12 }, { kind: "first_token", ttft_s: 0.25 },
        { kind: "request_ended", model: "tiny", outcome: "complete", tokens: 80, tok_s: 31.5 },
        { kind: "instance", id: "1", model: "tiny", state: "ready", nodes: ["one", "two"] },
      ];
      const begun = performance.now();
      let sent = 0;
      const timer = setInterval(() => {
        const due = Math.min(count, Math.floor((performance.now() - begun) / 1000 * perSecond));
        for (; sent < due; sent += 1) {
          hearEvent({ seq: first + sent, unix_ms: Date.now(), request: sent, ...kinds[sent % kinds.length] });
        }
        if (sent === count) { clearInterval(timer); done(); }
      }, 20);
    }), [first, count, perSecond]);
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

/** Waits until a node, which opens its API for a model when that is ready, lists one. */
async function listsModel(node) {
  const begun = performance.now();
  for (;;) {
    // The API may be opened anew under a request.
    const told = await fetch(`${node.url}/v1/models`).then((response) => response.json()).catch(() => ({}));
    if (told.data?.length > 0) return;
    check(performance.now() - begun < PATIENCE_MS, `${node.url} lists no model: ${JSON.stringify(told)}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

async function cluster() {
  const homes = ["one", "two"].map(() => mkdtempSync(join(tmpdir(), "dash-")));
  const nodes = await Promise.all(homes.map((home, at) => up(BINARY, home, ["one", "two"][at])));
  const [one, two] = nodes;
  try {
    const page = await open(one.url);
    page.on("dialog", (dialog) => dialog.accept());
    await run("dashboard: a node is paired by one page's code in the other's page", async () => {
      await page.click("#invite");
      const code = await page.locator("#code b").textContent();
      const other = await open(two.url);
      await other.click("#join summary");
      await other.fill("#join [name=code]", code);
      await other.fill("#join [name=peer]", `127.0.0.1:${one.port}`);
      await other.press("#join [name=peer]", "Enter");
      await other.locator("#join-said", { hasText: "in cluster" }).waitFor();
      check(other.wrong.length === 0, other.wrong.join("; "));
      await other.context().close();
      await page.locator("#nodes li").nth(1).waitFor();
      await page.locator("#events li.good", { hasText: "two" }).waitFor();
      // The other's telemetry comes over the cluster.
      await page.locator("#nodes li").nth(1).getByText("Memory", { exact: true }).waitFor();
    });
    await run("dashboard: the link between both is drawn with its measured latency", async () => {
      await page.locator("#links li", { hasText: /one to two.* ms/ }).waitFor();
      await page.waitForFunction(() => [...document.querySelectorAll("#map text.way")].some((label) => label.textContent.endsWith(" ms")));
    });
    await run("dashboard: a model is loaded over both and answers", async () => {
      await page.click("#load summary");
      await page.fill("[name=model]", MODEL);
      await page.fill("[name=count]", "2");
      await page.click("#try");
      // A placement of each kind over both machines, with its prediction.
      await page.waitForFunction(() => document.querySelectorAll("#preview .pill.good").length === 2);
      await page.locator("#preview .facts", { hasText: "tok/s" }).first().waitFor();
      await page.click("#load-form [type=submit]");
      await page.locator("#instances .pill.good").waitFor();
      await page.waitForFunction(() => document.querySelectorAll("#instances .shards span").length === 2);
      await page.locator("#send:not([disabled])").waitFor();
      await listsModel(one); // the page asks this node
      await chat(page, "Name three colours of the rainbow.");
      await page.locator("#chat-said:not(:empty)").waitFor();
      const said = await page.locator("#talk .assistant").textContent();
      check(said.length > 0, "the model said nothing");
    });
    await run("dashboard: an answer is seen stage by stage, and what the machines exchange for it", async () => {
      await page.click("#stages summary");
      await page.locator("#stage-list li").first().waitFor(); // it is being looked at
      const isSeen = () => document.querySelectorAll("#stage-list .stage").length === 2
        && [...document.querySelectorAll("#stage-list .stage")].every((stage) => /compute [\d.]+ ms/.test(stage.textContent) && stage.querySelector(".lane i.c"))
        && [...document.querySelectorAll("#links span")].some((link) => link.textContent.includes("models move"));
      for (let again = 2; ; again -= 1) { // an answer may end before both were seen
        await page.click("#chat-clear");
        await page.locator("#send:not([hidden]):not([disabled])").waitFor();
        await chat(page, "Write a very long story about the sea.");
        try {
          await page.waitForFunction(isSeen, undefined, { timeout: again ? 10_000 : PATIENCE_MS });
          break;
        } catch (error) { if (again === 0) throw error; }
      }
      await page.click("#chat-clear");
      await page.click("#stages summary");
    });
    await run("dashboard: the cluster for axe, nothing cut", () => looks(one.url, 1280, "light"));
    await run("dashboard: a download that cannot be had says why", async () => {
      await page.click("#load summary");
      await page.fill("#load-form [name=model]", "no such model");
      await page.click("#fetch");
      await page.waitForFunction(() => {
        const words = document.querySelector("#load-said").textContent;
        return words !== "" && words !== "asking";
      });
      await page.click("#load summary");
      page.wrong = page.wrong.filter((line) => !line.includes("400")); // Chromium's line about the answer
    });
    await run("dashboard: the model is unloaded", async () => {
      await page.click("#instances button");
      await page.locator("#none-loaded:not([hidden])").waitFor();
    });
    await run("dashboard: keys are made, listed and revoked", async () => {
      await page.fill("#key-form [name=name]", "laptop");
      const asked = page.waitForEvent("dialog");
      await page.press("#key-form [name=name]", "Enter");
      const words = (await asked).message();
      check(/one, .*two|two, .*one/.test(words), `the first key warns: ${words}`);
      await page.locator("#key-said", { hasText: /pl-.*next start/ }).waitFor();
      await page.locator("#keys li", { hasText: "laptop" }).waitFor();
      await page.fill("#key-form [name=name]", "phone");
      await page.press("#key-form [name=name]", "Enter");
      await page.locator("#keys li", { hasText: "phone" }).waitFor();
      await page.click("#keys li:has-text('phone') button");
      await page.waitForFunction(() => document.querySelectorAll("#keys li").length === 1);
    });
    await run(`dashboard: a killed node is told within ${WENT_WITHIN_MS} ms`, async () => {
      const killed = Date.now();
      two.child.kill("SIGKILL");
      await page.locator("#events li.bad, #events li.warn", { hasText: "two" }).first().waitFor({ timeout: 20_000 });
      const took = Date.now() - killed;
      check(took <= WENT_WITHIN_MS, `it took ${took} ms`);
    });
    await run("dashboard: the cluster: no error in the console", () => check(page.wrong.length === 0, page.wrong.join("; ")));
  } finally {
    for (const { child } of nodes) child.kill("SIGTERM");
    await new Promise((done) => setTimeout(done, 500));
    for (const { child } of nodes) child.kill("SIGKILL");
    for (const home of homes) rmSync(home, { recursive: true, force: true });
  }
}

if (url) {
  await oneNode();
  await manyEvents();
}
if (BINARY && MODEL) await run("dashboard: the cluster ends", cluster);
await browser.close();
process.exit(failed ? 1 : 0);
