// Texts of models: the server parses Markdown, this module makes elements from its trees.
"use strict";

import { ask } from "./api.js";
import { button, copy, el } from "./dom.js";

const SHOWN_MAX = 8_000; // characters of a plain text that are shown at first: a line of more takes long to lay out
const MORE = 32_000; // characters that are added at once
const ASKED_MAX = 8; // texts of a request; a text has 128 KiB at most
const FRAME_MS = 8; // work on elements within a frame
const TAGS = new Set(["p", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "tr", "th", "td", "em", "strong", "del", "code", "br", "hr"]);

// ---- trees to elements

function make(node) {
  if (typeof node === "string") return node;
  const children = () => node.children.map(make);
  if (node.tag === "pre") return codeBlock(node);
  if (node.tag === "table") return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, ...children()));
  if (node.tag === "a") {
    if (!/^(https?:\/\/|mailto:)/i.test(node.href || "")) return el("span", {}, ...children());
    return el("a", { href: node.href, target: "_blank", rel: "noopener noreferrer", title: node.href }, ...(node.children.length ? children() : [node.href]));
  }
  if (!TAGS.has(node.tag)) return el("span", {}, ...children());
  return el(node.tag, { start: node.start, class: node.align }, ...children());
}

function codeBlock(node) {
  const words = node.children.join("").replace(/\n$/, "");
  const doCopy = button("Copy", () => copy(words, doCopy));
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, node.lang || "text"), doCopy),
    el("pre", { tabindex: "0", role: "region", "aria-label": `Code${node.lang ? `, ${node.lang}` : ""}` }, el("code", {}, words)));
}

// Sets the blocks of a text and keeps equal ones. Takes several frames for many.
async function fill(body, tree) {
  const blocks = tree.map((node) => JSON.stringify(node));
  if (!body.blocks) { body.replaceChildren(); body.blocks = []; }
  const turn = body.turn = Symbol("turn");
  let begun = performance.now();
  for (const [at, block] of blocks.entries()) {
    if (body.blocks[at] === block) continue;
    if (performance.now() - begun > FRAME_MS) {
      await new Promise(requestAnimationFrame);
      if (body.turn !== turn) return; // a newer text
      begun = performance.now();
    }
    const made = make(tree[at]);
    if (body.childNodes[at]) body.replaceChild(typeof made === "string" ? new Text(made) : made, body.childNodes[at]);
    else body.append(made);
    body.blocks[at] = block;
  }
  while (body.childNodes.length > blocks.length) body.lastChild.remove();
  body.blocks.length = blocks.length;
  body.classList.remove("plain");
}

// ---- plain texts

export function plain(body, words) {
  body.turn = body.blocks = undefined;
  body.classList.add("plain");
  const hidden = words.length - SHOWN_MAX;
  if (hidden <= 0) {
    if (body.childNodes.length === 1 && body.firstChild.nodeType === Node.TEXT_NODE) { if (body.firstChild.data !== words) body.firstChild.data = words; } else body.replaceChildren(words);
    return;
  }
  let shown = SHOWN_MAX;
  const more = button(`Show more of ${(words.length / 1e6).toFixed(2)} million characters`, () => {
    more.before(el("span", { class: "piece" }, words.slice(shown, shown + MORE)));
    shown += MORE;
    if (shown >= words.length) more.remove();
  });
  body.replaceChildren(words.slice(0, SHOWN_MAX), more);
}

// ---- asking: texts of one moment go together

let waiting = [], isAsking = false;

// Shows a text as Markdown once the server has parsed it; as it is where it cannot be.
export function render(body, words) {
  body.wanted = words;
  if (!body.blocks) plain(body, words);
  waiting = waiting.filter((it) => it !== body);
  waiting.push(body);
  askSoon();
}

async function askSoon() {
  if (isAsking) return;
  isAsking = true;
  await null;
  while (waiting.length) {
    const bodies = waiting.splice(0, ASKED_MAX), texts = bodies.map((body) => body.wanted);
    try {
      const small = texts.map((words) => (words.length > 128 * 1024 ? "" : words));
      const { trees } = await ask("markdown", { texts: small });
      for (const [at, body] of bodies.entries()) {
        if (body.wanted !== texts[at] && waiting.includes(body)) continue;
        if (trees[at]?.length && small[at]) await fill(body, trees[at]); else plain(body, texts[at]);
      }
    } catch { /* the texts stay as they are */ }
    await new Promise(requestAnimationFrame);
  }
  isAsking = false;
}
