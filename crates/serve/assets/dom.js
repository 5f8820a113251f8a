// Elements, texts and figures. All text enters the page as text nodes.
"use strict";

const CLOCK = new Intl.DateTimeFormat([], { timeStyle: "medium", hour12: false });
const SVG = ["svg", "g", "circle", "line", "path", "text", "title"];

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes, ...children) {
  const node = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const button = (words, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, words);

// These functions set texts, classes, attributes and styles only where they change: the browser works for every setting.
export function text(node, value) {
  const only = node.firstChild, words = value ?? "";
  if (!only || only.nextSibling || only.nodeType !== Node.TEXT_NODE) {
    if (node.textContent !== words) node.textContent = words;
  } else if (only.data !== words) only.data = words;
}

export function classed(node, names) {
  if (node.className !== names) node.className = names;
}

export function attr(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function style(node, name, value) {
  if (node.style[name] !== value) node.style[name] = value;
}

// Keeps one element for each item of a list, by key, in order.
export function keyed(parent, items, key, make, update = () => {}) {
  parent.kept = parent.kept || new Map();
  const kept = parent.kept;
  const keys = new Set(items.map(key));
  for (const [old, node] of kept) if (!keys.has(old)) { node.remove(); kept.delete(old); }
  items.forEach((item, at) => {
    let node = kept.get(key(item));
    if (!node) { node = make(item); kept.set(key(item), node); }
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] || null);
    update(node, item);
  });
}

export function bytes(n) {
  if (n === undefined || n === null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < 4) { n /= 1024; at += 1; }
  return `${n < 10 && at > 0 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

// A model's file goes by its name.
export const nick = (model) => (model.startsWith("/") || model.startsWith(".") ? model.split("/").pop() : model);
export const percent = (share) => `${Math.round(share * 100)} %`;
export const rate = (tokS) => (tokS === undefined || tokS === null ? "–" : tokS.toFixed(tokS < 10 ? 2 : tokS < 1000 ? 1 : 0));
export const seconds = (s) => (s === undefined || s === null ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`);

// Measured links, as `paceline nodes` writes them.
const MBS = 1e6;
export const wayRate = (bytesS) => `${(bytesS / MBS).toFixed(bytesS < 10 * MBS ? 1 : 0)} MB/s`;
export const millis = (s) => `${(s * 1000).toFixed(2)} ms`;

export function way(it) {
  if (!it) return "no way";
  return [it.interface, millis(it.latency_s), it.bytes_per_s !== undefined && wayRate(it.bytes_per_s)].filter(Boolean).join(", ");
}

// The time of an event; most have the second of the one before.
let lastSecond = [0, ""];
export function clock(ms) {
  const second = Math.floor(ms / 1000);
  if (lastSecond[0] !== second) lastSecond = [second, CLOCK.format(second * 1000)];
  return lastSecond[1];
}

export function meter(name) {
  return el("div", { class: "meter" }, el("span", {}, name), el("span", { class: "bar" }, el("i", {})), el("span", {}));
}

export function setMeter(node, share, words) {
  node.hidden = share === undefined;
  if (share === undefined) return;
  const bar = node.children[1].firstChild;
  style(bar, "width", `${Math.round(Math.min(share, 1) * 1000) / 10}%`);
  classed(bar, share > .97 ? "bad" : share > .88 ? "warn" : "");
  text(node.lastChild, words);
}

export function stateKind(word) {
  return { alive: "good", ready: "good", ok: "good", suspect: "warn", recovering: "warn", doubtful: "warn", missing: "warn", failed: "bad", dead: "bad", blocked: "bad" }[word] || "";
}

// Says in `said` how a command went.
export async function inForm(said, words, run) {
  text(said, words);
  try { text(said, (await run()) || ""); } catch (error) { text(said, error.message); }
}

export function submits(form, said, words, run) {
  $(form).addEventListener("submit", (event) => { event.preventDefault(); inForm($(said), words, run); });
}

// Copies words and says so on the button.
export async function copy(words, from) {
  const label = from.textContent;
  let done = true;
  try { await navigator.clipboard.writeText(words); } catch { done = copyBySelection(words); }
  text(from, done ? "Copied" : "Not copied");
  setTimeout(() => text(from, label), 1500);
}

// Browsers have no clipboard on pages by plain HTTP from other machines.
function copyBySelection(words) {
  const area = el("textarea", { class: "away", "aria-hidden": "true" });
  area.value = words;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

// Offers `words` as a file.
export function download(name, words, type) {
  const url = URL.createObjectURL(new Blob([words], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
