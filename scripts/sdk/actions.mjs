// What the dashboard's checks do on the page: actions at each width, tasks by their clicks, and a hostile chat.

import { join } from "node:path";

export const WIDTHS = [1440, 768, 390];

const ANSWER = { timeout: 60_000 }; // a short answer on a busy machine

function check(holds, what) {
  if (!holds) throw new Error(what);
}

const view = (page, name) => page.click(`nav a[href="#${name}"]`);
const named = (page, name, role = "button") => page.getByRole(role, { name, exact: true });

/** Does what asks for an answer; resolves when the answer is whole. A short one may be whole before
 * a look at the stop button, so the page itself notes that the button was there. */
async function answered(page, act) {
  await page.evaluate(() => {
    const stop = document.getElementById("stop");
    window.hasBegun = false;
    new MutationObserver((_, observer) => {
      if (stop.hidden) return;
      window.hasBegun = true;
      observer.disconnect();
    }).observe(stop, { attributes: true });
  });
  await act();
  await page.waitForFunction(() => window.hasBegun);
  await page.locator("#send:not([hidden]):not([disabled])").waitFor(ANSWER);
}

/** Sends words; resolves when the answer is whole. */
async function ask(page, words) {
  await page.fill("#say", words);
  await answered(page, () => page.press("#say", "Enter"));
}

const last = (page) => page.locator("#talk .msg.assistant").last();

async function openHistory(page) {
  if (!(await page.locator("#history .side").isVisible())) await page.click("#history summary");
}

/** The actions of a width, in order; the first width also watches a download. */
export function actions({ first }) {
  return [
    ["the chat comes first, with its composer in sight", async (page) => {
      await page.locator("#link.good").waitFor();
      check(await page.locator("#say").evaluate((it) => it.getBoundingClientRect().bottom <= innerHeight), "the composer is out of sight");
      await page.locator("#empty-find").click();
      await page.locator("#view-models").waitFor();
    }],
    ["the catalogue tells sizes, fit and predicted speed", async (page) => {
      const row = page.locator("#found li").filter({ has: page.getByText("smollm2", { exact: true }) });
      await row.getByText(/94 MiB · about [\d.]+ tokens\/s predicted/).waitFor();
      await row.getByText("fits", { exact: true }).waitFor();
    }],
    ["the catalogue is filtered by words", async (page) => {
      await page.fill("#find", "gemma3-270m");
      await page.waitForFunction(() => document.querySelectorAll("#found li").length === 1);
      await page.fill("#find", "");
    }],
    ["the hub is searched", async (page) => {
      await page.fill("#find", "o/");
      await named(page, "Search the hub").click();
      await page.locator("#hub > li", { hasText: "1,200 downloads" }).nth(1).waitFor();
    }],
    ["a repository's choices have size, fit and speed before a download", async (page) => {
      await named(page, "Sizes and fit of o/several").click();
      const choices = page.locator("#hub li li");
      await choices.filter({ hasText: "64 MiB" }).getByText(/about [\d.]+ tokens\/s predicted from its size/).waitFor();
      await choices.filter({ hasText: "TiB" }).getByText("too large").waitFor();
    }],
    ["a download shows its progress and is cancelled", async (page) => {
      await named(page, "Sizes and fit of o/one").click();
      await named(page, "Download o/one").click();
      await page.locator("#downloads", { hasText: / of 94 MiB/ }).waitFor();
      await named(page, "Cancel o/one").click();
      await page.locator("#downloads", { hasText: "cancelled" }).waitFor();
    }],
    ["it is tried again, and is here", async (page) => {
      await named(page, "Retry o/one").click();
      await page.locator("#downloads .pill.good", { hasText: "here" }).waitFor();
      await named(page, "Dismiss o/one").click();
      await page.locator("#stored li", { hasText: "o/one" }).waitFor();
    }],
    ["a download that cannot be had says why", async (page) => {
      await page.fill("#find", "o/missing");
      await named(page, "Search the hub").click();
      await named(page, "Sizes and fit of o/missing").click();
      await page.locator("#hub [role=status]", { hasText: "o/missing" }).waitFor();
    }],
    ["a model is previewed", async (page) => {
      await page.locator("#stored li", { hasText: "o/one" }).getByRole("button", { name: /^Load/ }).click();
      await page.locator("#preview .pill.good").first().waitFor();
      await page.fill("#load-form [name=count]", "2");
      await page.waitForFunction(() => document.querySelectorAll("#preview .pill.good").length === 2);
      await page.locator("#preview .facts", { hasText: "tokens/s" }).first().waitFor();
      await page.selectOption("#load-form [name=split]", "pipeline");
    }],
    ["it is loaded over both machines", async (page) => {
      await page.click("#load-form [type=submit]");
      await page.waitForFunction(() => document.querySelectorAll("#instances .shards span").length === 2);
      await page.locator("#instances .pill.good").waitFor(ANSWER);
    }],
    ["settings hold for the conversation", async (page) => {
      await page.locator("#instances").getByRole("button", { name: /^Chat with/ }).click();
      await page.click("#sampling summary");
      await page.fill("[name=system]", "You answer in one word.");
      await page.fill("[name=temperature]", "0");
      await page.fill("[name=max_tokens]", "8");
      await page.click("#sampling summary");
    }],
    ["an answer comes with its tokens and speed", async (page) => {
      await ask(page, "Name three colours of the rainbow.");
      await last(page).locator(".facts", { hasText: /tokens · [\d.]+ tokens\/s · first after/ }).waitFor();
      check((await last(page).locator(".body").textContent()).length > 0, "the model said nothing");
    }],
    ["it is copied", async (page) => {
      await last(page).getByRole("button", { name: "Copy" }).click();
      await last(page).getByRole("button", { name: "Copied" }).waitFor();
    }],
    ["it is made anew", async (page) => {
      await answered(page, () => last(page).getByRole("button", { name: "Regenerate" }).click());
      await last(page).locator(".facts", { hasText: "tokens" }).waitFor();
      check((await page.locator("#talk .msg").count()) === 2, "the conversation has another answer");
    }],
    ["a question is edited", async (page) => {
      await page.getByRole("button", { name: "Edit" }).click();
      check((await page.inputValue("#say")).startsWith("Name three"), "the words are gone");
      await ask(page, "Name two colours.");
      check((await page.locator("#talk .msg.user .body").textContent()) === "Name two colours.", "the question is the old one");
    }],
    ["a file is attached", async (page) => {
      await page.setInputFiles("#file", { name: "main.rs", mimeType: "text/plain", buffer: Buffer.from("fn main() {}\n") });
      await page.locator("#files li", { hasText: "main.rs" }).waitFor();
      await ask(page, "What is this?");
      await page.locator("#talk .file summary", { hasText: "main.rs" }).waitFor();
    }],
    ["an answer is stopped", async (page) => {
      await page.click("#sampling summary");
      await page.fill("[name=max_tokens]", "2000");
      await page.click("#sampling summary");
      await page.fill("#say", "Write a very long story about the sea.");
      await page.press("#say", "Enter");
      await page.waitForFunction(() => [...document.querySelectorAll("#talk .assistant .body")].at(-1)?.textContent.length > 0);
      await page.click("#stop");
      await last(page).locator(".facts", { hasText: "stopped" }).waitFor();
    }],
    ["a reload keeps the conversation", async (page) => {
      await page.reload();
      await page.locator("#talk .msg.user", { hasText: "Name two colours." }).waitFor();
      check((await page.locator("#talk .msg").count()) === 6, "messages are lost");
    }],
    ["a new conversation begins, and the old one is opened", async (page) => {
      await openHistory(page);
      await page.click("#new-chat");
      await page.locator("#chat-empty").waitFor();
      await openHistory(page);
      await page.locator("#chats button", { hasText: "Name three" }).first().click();
      await page.locator("#talk .msg").nth(5).waitFor();
    }],
    ["conversations are exported", async (page) => {
      await openHistory(page);
      const [one] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
      check(one.suggestedFilename().endsWith(".md"), one.suggestedFilename());
      const [all] = await Promise.all([page.waitForEvent("download"), page.click("#export-all")]);
      check(all.suggestedFilename().endsWith(".json"), all.suggestedFilename());
    }],
    ["a conversation is deleted", async (page) => {
      await openHistory(page);
      await page.locator("#chats li button:last-child").first().click();
      await page.locator("#no-chats").waitFor();
    }],
    ["requests and events are shown", async (page) => {
      await view(page, "activity");
      await page.locator("#events b", { hasText: "complete" }).first().waitFor();
      await page.locator("#events b", { hasText: "stopped" }).first().waitFor();
    }],
    ["an answer is seen stage by stage", async (page) => {
      await page.click("#stages summary");
      await page.locator("#stage-list li").first().waitFor();
      if (first) await stageByStage(page);
      await page.click("#stages summary");
    }],
    ["a machine is invited by a code and a command", async (page) => {
      await view(page, "machines");
      await page.click("#invite");
      await page.locator("#code code", { hasText: /paceline join \d/ }).waitFor();
      await named(page, "Copy the command").click();
    }],
    ["devices of both machines are shown", async (page) => {
      for (const name of ["one", "two"]) {
        const machine = page.locator("#nodes li").filter({ has: page.getByText(name, { exact: true }) });
        await machine.getByText(/\d+ cores? · .* · version/).waitFor();
        await machine.getByText("Memory", { exact: true }).waitFor();
      }
    }],
    ["the health of this machine is checked", async (page) => {
      await page.click("#check-health");
      await page.locator("#health li", { hasText: "memory" }).first().waitFor();
    }],
    ["another machine's lines are read", async (page) => {
      await named(page, "Log of two").click();
      await page.locator("#log-lines li", { hasText: "listening on" }).waitFor();
      await page.click("#log-close");
    }],
    ["a key is made, copied and revoked", async (page) => {
      await page.fill("#key-form [name=name]", "laptop");
      await page.press("#key-form [name=name]", "Enter");
      await page.locator("#key-made code", { hasText: "pl-" }).waitFor();
      await named(page, "Copy the key").click();
      await named(page, "Revoke the key of laptop").click();
      await page.locator("#no-keys").waitFor();
    }],
    ["the keyboard reaches all views and what they hold", async (page) => {
      await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
      await page.locator(".skip").focus();
      for (const name of ["Chat", "Models", "Machines", "Activity"]) {
        await page.keyboard.press("Tab");
        await page.keyboard.press("Enter");
        await page.locator(`#view-${name.toLowerCase()}`).waitFor();
        check((await page.evaluate(() => document.activeElement.textContent)) === name, `${name} has not the focus`);
      }
      for (const next of ["theme", "requests"]) { // the table scrolls by keys where it is wide
        await page.keyboard.press("Tab");
        check(await page.evaluate((id) => document.activeElement.id === id || document.activeElement.querySelector(`#${id}`), next), `${next} has not the focus`);
      }
    }],
    ["colours are changed", async (page) => {
      for (const theme of ["light", "dark", ""]) {
        await page.click("#theme");
        check((await page.evaluate(() => document.documentElement.dataset.theme || "")) === theme, theme);
      }
    }],
    ["a loaded model is not deleted", async (page) => {
      await view(page, "models");
      await page.locator("#stored li", { hasText: "o/one" }).getByRole("button", { name: /^Delete/ }).click();
      await page.locator("#stored-said", { hasText: "is loaded" }).waitFor();
    }],
    ["the model is unloaded", async (page) => {
      await page.locator("#instances").getByRole("button", { name: /^Unload/ }).click();
      await page.locator("#none-loaded:not([hidden])").waitFor();
    }],
    ["it is deleted, and the disk is free", async (page) => {
      await page.locator("#stored li", { hasText: "o/one" }).getByRole("button", { name: /^Delete/ }).click();
      await page.locator("#stored-said", { hasText: /deleted .*94 MiB are free/ }).waitFor();
      await page.locator("#none-stored").waitFor();
    }],
  ];
}

/** While an answer is written, both stages and their traffic are seen. */
async function stageByStage(page) {
  await page.evaluate(() => {
    const model = document.querySelector("#chat-model").value;
    const messages = [{ role: "user", content: "Write a very long story about the sea." }];
    window.story = new AbortController();
    const body = JSON.stringify({ model, messages, max_tokens: 1500 });
    fetch("/v1/chat/completions", { method: "POST", signal: window.story.signal, headers: { "Content-Type": "application/json" }, body }).catch(() => {});
  });
  await page.waitForFunction(() => document.querySelectorAll("#stage-list .stage").length === 2
    && [...document.querySelectorAll("#stage-list .stage")].every((stage) => /compute [\d.]+ ms/.test(stage.textContent) && stage.querySelector(".lane i.c")));
  await page.evaluate(() => window.story.abort());
}

/** Ten tasks from the start page, each in three clicks at most; the answer to a confirmation is a click. */
export function tasks(page, url) {
  let clicks = 0;
  const click = async (locator) => { clicks += 1; await (typeof locator === "string" ? page.locator(locator) : locator).click(); };
  const tab = (name) => click(`nav a[href="#${name}"]`);
  const of = (most, act) => async () => {
    clicks = 0;
    await page.goto("about:blank");
    await page.goto(url);
    await page.locator("#link.good").waitFor();
    await act();
    check(clicks <= most, `${clicks} clicks, ${most} at most`);
  };
  const answered = (accept) => page.once("dialog", (dialog) => { clicks += 1; return accept ? dialog.accept() : dialog.dismiss(); });
  return [
    ["fetch a model (Models, Search the hub by Enter, Sizes and fit, Download)", of(3, async () => {
      await tab("models");
      await page.fill("#find", "o/one");
      await page.press("#find", "Enter");
      await click(named(page, "Sizes and fit of o/one"));
      await click(named(page, "Download o/one"));
      await page.locator("#downloads .pill.good").waitFor();
    })],
    ["load a model (Models, Load…, Load)", of(3, async () => {
      await tab("models");
      await click(page.locator("#stored li", { hasText: "o/one" }).getByRole("button", { name: /^Load/ }));
      await page.locator("#preview .pill.good").first().waitFor();
      await click("#load-form [type=submit]");
      await page.locator("#instances .pill.good").waitFor(ANSWER);
    })],
    ["ask something (Send)", of(1, async () => {
      await page.locator("#send:not([disabled])").waitFor();
      await page.fill("#say", "Say one word.");
      await click("#send");
      await last(page).locator(".facts", { hasText: "tokens" }).waitFor(ANSWER);
    })],
    ["see why it is slow (Activity, Why is it slow?)", of(2, async () => {
      await tab("activity");
      await click("#stages summary");
      await page.locator("#stage-list li").first().waitFor();
    })],
    ["set how answers are sampled (Settings)", of(1, async () => {
      await click("#sampling summary");
      await page.fill("[name=temperature]", "0.5");
    })],
    ["invite a laptop (Machines, Let a machine in)", of(2, async () => {
      await tab("machines");
      await click("#invite");
      await page.locator("#code b").waitFor();
    })],
    ["read a machine's log (Machines, Log)", of(2, async () => {
      await tab("machines");
      await click(named(page, "Log of one"));
      await page.locator("#log-lines li").first().waitFor();
    })],
    ["check this machine's health (Machines, Check)", of(2, async () => {
      await tab("machines");
      await click("#check-health");
      await page.locator("#health li").first().waitFor();
    })],
    ["keep a conversation as a file (Conversations, Export this one)", of(2, async () => {
      await click("#history summary");
      await Promise.all([page.waitForEvent("download"), click("#export")]);
    })],
    ["end a model's use of memory (Models, Unload, OK)", of(3, async () => {
      await tab("models");
      answered(true);
      await click(page.locator("#instances").getByRole("button", { name: /^Unload/ }));
      await page.locator("#none-loaded:not([hidden])").waitFor();
    })],
    ["free the disk space of a model (Models, Delete, OK)", of(3, async () => {
      await tab("models");
      answered(true);
      await click(page.locator("#stored li", { hasText: "o/one" }).getByRole("button", { name: /^Delete/ }));
      await page.locator("#stored-said", { hasText: "are free" }).waitFor();
    })],
    ["revoke a machine (Machines, Revoke, OK)", of(3, async () => {
      await tab("machines");
      answered(false); // the other checks need it
      await click(named(page, "Revoke two"));
    })],
  ];
}

const HOSTILE = [
  "<script>window.hacked = 1</script>", "<svg onload=\"window.hacked=1\"><script>window.hacked=1</script></svg>", "<img src=x onerror=\"window.hacked=1\">",
  "[a](javascript:window.hacked=1) [b](data:text/html,<script>window.hacked=1</script>) ![c](https://evil.example/x.png)",
  "<iframe src=\"https://evil.example\"></iframe><style>body{display:none}</style>", "<a href=\"javascript:window.hacked=1\">x</a><form action=\"https://evil.example\"><button>y</button></form>",
  "```html\n<script>window.hacked=1</script>\n```", "# [x](vbscript:1)\n\n| <b>a</b> | b |\n|-|-|\n| <svg/onload=window.hacked=1> | `</script>` |", `${"> ".repeat(2000)}deep`, "*a* ".repeat(20_000),
];
const LINE = "<svg onload=window.hacked=1>".repeat(36_000); // 1 MB
const MESSAGES = 200, RUNS = 5, STEPS = 30, FRAME_MS = 50;

/** Opens and scrolls a kept conversation of hostile Markdown. */
export async function hostile(page, shots) {
  await page.locator("#link.good").waitFor();
  await page.evaluate(async ([texts, line, count]) => {
    const { save } = await import("/assets/chats.js");
    const messages = Array.from({ length: count }, (_, at) => ({ role: at % 2 ? "assistant" : "user", model: "m", content: at % 20 === 9 ? line : `**${at}** ${texts[at % texts.length]}\n\n${texts[(at * 7 + 3) % 8]}`, facts: "" }));
    await save({ id: "hostile", title: "hostile", at: Date.now(), model: "", settings: {}, messages });
    localStorage.setItem("chat", "hostile");
  }, [HOSTILE, LINE, MESSAGES]);
  const devtools = await page.context().newCDPSession(page);
  await devtools.send("Performance.enable", { timeDomain: "threadTicks" }); // other programs do not count
  const busy = async () => (await devtools.send("Performance.getMetrics")).metrics.find(({ name }) => name === "TaskDuration").value * 1000;
  const longest = [];
  for (let run = 0; run < RUNS; run += 1) {
    await page.reload();
    await page.locator("#talk .msg").nth(MESSAGES - 1).waitFor();
    let most = 0, before = await busy();
    for (let at = 0; at < STEPS; at += 1) {
      await page.evaluate((part) => new Promise((done) => {
        const talk = document.querySelector("#talk");
        talk.scrollTop = talk.scrollHeight * (1 - part);
        requestAnimationFrame(() => setTimeout(done)); // the frame is drawn
      }), at / STEPS);
      const now = await busy();
      most = Math.max(most, now - before);
      before = now;
    }
    longest.push(most);
  }
  const found = await page.evaluate(() => ({
    hacked: window.hacked, tags: [...new Set([...document.querySelectorAll("#talk *")].map((it) => it.localName))],
    links: [...document.querySelectorAll("#talk a")].map((it) => it.protocol), parsed: document.querySelectorAll("#talk .body strong").length,
  }));
  const allowed = ["article", "p", "div", "span", "button", "details", "summary", "pre", "code", "a", "strong", "em", "blockquote", "table", "tr", "th", "td", "h3", "ul", "ol", "li", "br"];
  if (shots) await page.screenshot({ path: join(shots, "hostile.png") });
  check(found.hacked === undefined, "a script ran");
  check(found.parsed > 5, `${found.parsed} messages are parsed`);
  check(found.tags.every((tag) => allowed.includes(tag)), found.tags.join(", "));
  check(found.links.every((protocol) => protocol === "https:"), found.links.join(", "));
  check(page.wrong.length === 0, page.wrong.join("; "));
  const median = longest.sort((a, b) => a - b)[RUNS >> 1];
  console.error(`longest frames: ${longest.map((ms) => ms.toFixed(0)).join(", ")} ms`);
  check(median <= FRAME_MS, `the longest frame takes ${median.toFixed(0)} ms`);
  await page.context().close();
}
