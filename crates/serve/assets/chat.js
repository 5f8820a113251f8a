// The chat: a conversation with a model, kept in the browser.
"use strict";

import { post, readEvents, reason, state } from "./api.js";
import * as chats from "./chats.js";
import { $, attr, button, copy, download, el, inForm, keyed, nick, rate, seconds, text } from "./dom.js";
import { plain, render } from "./markdown.js";

const DRAW_MS = 250; // between two drawings of an answer that is being written
const SAVE_MS = 3000; // between two savings of it
const FILES_MAX = 8, FILE_BYTES_MAX = 256 * 1024;
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const NEAR = 60; // pixels from the end within which the conversation follows an answer

let chat = fresh(); // { id, title, at, model, settings, messages: [{ role, content, files, reasoning, facts }] }
let files = []; // attached to the next message
let answering = null; // the AbortController of the running answer
let follows = true; // whether the end of the conversation stays in sight

function fresh(settings = {}) {
  return { id: crypto.randomUUID?.() || `${Date.now()}-${Math.random()}`, title: "", at: Date.now(), model: "", settings, messages: [] };
}

// ---- messages

// Parses the answers that are seen.
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    if (target.message) render(target, target.message.content);
  }
}, { rootMargin: "300px" });

function makeMessage(message) {
  const isUser = message.role === "user";
  const body = el("div", { class: "body" }), facts = el("span", { class: "facts" });
  const doCopy = button("Copy", () => copy(message.content, doCopy));
  const again = isUser ? button("Edit", () => edit(message)) : button("Regenerate", () => regenerate(message));
  const node = el("article", { class: `msg ${message.role}`, "aria-label": isUser ? "You" : `Answer of ${nick(message.model || "the model")}` },
    !isUser && message.model ? el("p", { class: "who" }, nick(message.model)) : null,
    ...(message.files || []).map(({ name, text: words }) => el("details", { class: "file" }, el("summary", {}, `${name} · ${words.length} characters`), el("pre", { tabindex: "0" }, words.slice(0, 16_000)))),
    body, el("div", { class: "foot" }, facts, doCopy, again));
  body.message = message;
  message.node = node;
  drawReasoning(message);
  text(facts, message.facts);
  plain(body, message.content);
  if (!isUser) seen.observe(body);
  return node;
}

const bodyOf = (message) => message.node.querySelector(".body");

function drawReasoning(message) {
  if (!message.reasoning) return;
  let fold = message.node.querySelector(".reasoning");
  if (!fold) {
    fold = el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), el("div", { class: "plain" }));
    bodyOf(message).before(fold);
  }
  plain(fold.lastChild, message.reasoning);
}

function drawAll() {
  $("talk").replaceChildren();
  for (const message of chat.messages) $("talk").append(makeMessage(message));
  drawEmpty();
  toEnd();
  for (const name of SETTINGS) $("chat-settings").elements[name].value = chat.settings[name] ?? "";
  text($("chat-said"), "");
}

function drawEmpty() {
  const ready = readyModels(), isEmpty = chat.messages.length === 0;
  $("chat-empty").hidden = !isEmpty;
  $("talk").hidden = isEmpty;
  text($("empty-words"), ready.length ? "Ask the model something." : "No model is loaded yet.");
  $("empty-find").hidden = ready.length > 0;
}

const isAtEnd = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < NEAR;

function toEnd() {
  follows = true;
  $("talk").scrollTop = $("talk").scrollHeight;
}

// Keeps the end in sight while texts grow, until the reader scrolls away.
function follow() {
  let frame = null;
  $("talk").addEventListener("scroll", () => { follows = isAtEnd(); }, { passive: true });
  new MutationObserver(() => {
    frame ??= follows ? requestAnimationFrame(() => { frame = null; if (follows) toEnd(); }) : null;
  }).observe($("talk"), { childList: true, subtree: true, characterData: true });
}

// A list without what belongs to the page.
const bare = () => ({ ...chat, messages: chat.messages.map(({ node, ...rest }) => rest) });

async function keep() {
  if (chat.messages.length === 0) return;
  chat.at = Date.now();
  chat.title ||= (chat.messages[0].content || chat.messages[0].files?.[0]?.name || "").slice(0, 60);
  try {
    const removed = await chats.save(bare());
    if (removed) text($("chat-said"), `${removed} old conversation${removed > 1 ? "s" : ""} made room for this one.`);
  } catch (error) { text($("chat-said"), `Not kept: ${error.message}`); }
  localStorage.setItem("chat", chat.id);
  listChats();
}

// ---- conversations

async function listChats() {
  const all = await chats.list();
  keyed($("chats"), all, (it) => it.id,
    (it) => el("li", {}, button("", () => openChat(it.id)), button("✕", () => removeChat(it.id))),
    (row, it) => {
      text(row.firstChild, it.title || "Conversation");
      attr(row.firstChild, "aria-current", it.id === chat.id);
      attr(row.lastChild, "aria-label", `Delete ${it.title}`);
    });
  $("no-chats").hidden = all.length > 0;
}

async function openChat(id) {
  stop();
  const found = await chats.get(id);
  if (!found) return listChats();
  chat = found;
  localStorage.setItem("chat", id);
  if (chat.model) $("chat-model").value = chat.model;
  drawAll();
  $("history").open = isWide();
  listChats();
}

async function removeChat(id) {
  if (!confirm("Delete this conversation?")) return;
  await chats.remove(id);
  if (id === chat.id) newChat(); else listChats();
  $("history").open = true;
}

function newChat() {
  stop();
  chat = fresh(chat.settings);
  localStorage.removeItem("chat");
  files = [];
  drawFiles();
  drawAll();
  $("history").open = isWide();
  listChats();
  $("say").focus();
}

const isWide = () => matchMedia("(min-width: 900px)").matches;

function asMarkdown() {
  const part = (it) => `## ${it.role === "user" ? "You" : it.model || "Answer"}\n\n${withFiles(it)}\n`;
  return [`# ${chat.title}\n`, chat.settings.system && `> ${chat.settings.system}\n`, ...chat.messages.map(part)].filter(Boolean).join("\n");
}

async function exportAll() {
  const all = await Promise.all((await chats.list()).map(({ id }) => chats.get(id)));
  download("paceline-conversations.json", JSON.stringify(all, null, 1), "application/json");
}

// ---- files

function drawFiles() {
  $("files").replaceChildren(...files.map((file, at) => el("li", {}, file.name, button("✕", () => { files.splice(at, 1); drawFiles(); }, { "aria-label": `Remove ${file.name}` }))));
}

async function attach(list) {
  for (const file of list) {
    if (files.length >= FILES_MAX) return text($("chat-said"), `${FILES_MAX} files at most`);
    const words = file.size <= FILE_BYTES_MAX ? await file.text() : "";
    if (file.size > FILE_BYTES_MAX) text($("chat-said"), `${file.name} has more than ${FILE_BYTES_MAX / 1024} KiB`);
    else if (words.includes("\0") || words.includes("\uFFFD")) text($("chat-said"), `${file.name} is not text`);
    else files.push({ name: file.name, text: words });
  }
  drawFiles();
}

// What the model gets of a message.
function withFiles({ content, files: own = [] }) {
  const fence = (words) => "`".repeat(Math.max(3, ...[...words.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  const parts = own.map(({ name, text: words }) => `${name}:\n${fence(words)}\n${words}\n${fence(words)}`);
  return [...parts, content].filter(Boolean).join("\n\n");
}

// ---- asking

function readyModels() {
  const answering = (state.status?.instances || []).filter((it) => it.state === "ready");
  return answering.filter((it, at) => answering.findIndex((other) => other.model === it.model) === at); // once for all replicas
}

export function drawChoice() {
  const ready = readyModels(), choice = $("chat-model");
  const options = ready.length ? ready : [{ model: "" }];
  keyed(choice, options, (it) => it.model, (it) => el("option", { value: it.model }, it.model ? nick(it.model) : "none loaded"));
  if (chat.model && chat.model !== choice.value && ready.some((it) => it.model === chat.model)) choice.value = chat.model;
  $("send").disabled = ready.length === 0;
  drawEmpty();
}

export function chatWith(model) {
  chat.model = model;
  drawChoice();
  location.hash = "#chat";
  $("say").focus();
}

function send(event) {
  event?.preventDefault();
  const words = $("say").value.trim();
  if ((!words && files.length === 0) || answering || !$("chat-model").value) return;
  add({ role: "user", content: words, files });
  $("say").value = "";
  files = [];
  drawFiles();
  answer();
}

function add(message) {
  chat.messages.push(message);
  $("talk").append(makeMessage(message));
  drawEmpty();
  toEnd();
}

// Removes a message and those after it.
function cutAt(message) {
  stop();
  for (const it of chat.messages.splice(chat.messages.indexOf(message))) it.node.remove();
}

function edit(message) {
  cutAt(message);
  $("say").value = message.content;
  files = message.files || [];
  drawFiles();
  drawEmpty();
  $("say").focus();
}

function regenerate(message) {
  if (!$("chat-model").value) return;
  cutAt(message);
  answer();
}

function stop() {
  answering?.abort();
  answering = null;
}

const numbered = (name) => (chat.settings[name] === undefined || chat.settings[name] === "" ? undefined : Number(chat.settings[name]));

function request() {
  const system = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
  return {
    model: chat.model, stream: true, stream_options: { include_usage: true },
    messages: [...system, ...chat.messages.filter((it) => it.role === "user" || it.content).map((it) => ({ role: it.role, content: withFiles(it) }))],
    temperature: numbered("temperature"), top_p: numbered("top_p"), max_tokens: numbered("max_tokens"), seed: numbered("seed"),
  };
}

async function answer() {
  const own = answering = new AbortController(), at = chat;
  chat.model = $("chat-model").value;
  const body = request(), message = { role: "assistant", model: chat.model, content: "", reasoning: "" };
  add(message);
  busy(true);
  keep();
  let drawn = 0, saved = performance.now();
  const draw = () => {
    if (chat !== at || performance.now() - drawn < DRAW_MS) return;
    drawn = performance.now();
    drawReasoning(message);
    render(bodyOf(message), message.content);
    if (drawn - saved > SAVE_MS) { saved = drawn; keep(); }
  };
  try {
    message.facts = await stream(body, own.signal, (content, reasoning) => { message.content += content; message.reasoning += reasoning; draw(); });
  } catch (error) {
    message.facts = error.name === "AbortError" ? "stopped" : error.message;
    message.failed = error.name !== "AbortError";
  }
  if (answering === own) answering = null;
  if (chat !== at) return; // another conversation is open
  finish(message);
}

function finish(message) {
  busy(Boolean(answering));
  if (!chat.messages.includes(message)) return;
  drawReasoning(message);
  text(message.node.querySelector(".facts"), message.facts);
  message.node.classList.toggle("failed", Boolean(message.failed));
  render(bodyOf(message), message.content);
  keep();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (is) $("talk").setAttribute("aria-busy", "true"); else $("talk").removeAttribute("aria-busy");
}

// Reads an answer; returns its tokens and speed.
async function stream(body, signal, hear) {
  const asked = performance.now();
  let response = await post("/v1/chat/completions", body, signal);
  // A node answers for a model some moments after the model's owner is ready.
  for (let again = 0; response.status === 503 && again < 4; again += 1) {
    await new Promise((done) => setTimeout(done, 500));
    response = await post("/v1/chat/completions", body, signal);
  }
  if (!response.ok) throw new Error(await reason(response));
  let first = 0, tokens = 0, ended = "";
  await readEvents(response, (data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    ended = chunk.choices?.[0]?.finish_reason || ended;
    const { content = "", reasoning_content: reasoning = "" } = chunk.choices?.[0]?.delta || {};
    if (!content && !reasoning) return;
    first = first || performance.now();
    hear(content || "", reasoning || "");
  });
  const took = (performance.now() - first) / 1000;
  const speed = first && tokens > 1 && took > 0 ? `${rate((tokens - 1) / took)} tokens/s` : "";
  return [`${tokens} tokens`, speed, first && `first after ${seconds((first - asked) / 1000)}`, ended === "length" && "cut at the most tokens"].filter(Boolean).join(" · ");
}

// ---- beginning

export async function begin() {
  $("chat-form").addEventListener("submit", send);
  $("say").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); });
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", newChat);
  $("chat-model").addEventListener("change", () => { chat.model = $("chat-model").value; });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => { await attach($("file").files); $("file").value = ""; });
  $("chat-form").addEventListener("dragover", (event) => event.preventDefault());
  $("chat-form").addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
  $("chat-settings").addEventListener("input", () => {
    for (const name of SETTINGS) chat.settings[name] = $("chat-settings").elements[name].value;
  });
  $("chat-settings").addEventListener("change", keep);
  $("chat-settings").addEventListener("submit", (event) => event.preventDefault());
  $("export").addEventListener("click", () => download(`${chat.title.replace(/[^\p{L}\p{N} ._-]/gu, "") || "conversation"}.md`, asMarkdown(), "text/markdown"));
  $("export-all").addEventListener("click", () => inForm($("chat-said"), "", exportAll));
  addEventListener("pagehide", keep);
  follow();
  $("history").open = isWide();
  drawEmpty();
  const last = localStorage.getItem("chat");
  if (last) await openChat(last); else listChats();
}
