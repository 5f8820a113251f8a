// Models: loaded, downloading, stored, and those to find.
"use strict";

import { ask, state } from "./api.js";
import { chatWith } from "./chat.js";
import { $, attr, button, bytes, classed, el, inForm, keyed, meter, nick, percent, rate, seconds, setMeter, stateKind, style, submits, text } from "./dom.js";

const PREVIEW_WAIT_MS = 300; // after a change in the form

const FOUND_FIRST = 12; // rows of the catalogue at first: the recommended and the smallest that fit

let stored = [], catalogue = null, showsAll = false, refresh = () => {};

// ---- loaded models

function makeInstance(it) {
  const unload = button("Unload", () => unloadModel(it, unload), { "aria-label": `Unload ${nick(it.model)}` });
  const talk = button("Chat", () => chatWith(it.model), { "aria-label": `Chat with ${nick(it.model)}` });
  const replica = it.replica ? ` replica ${it.replica.number}` : "";
  return el("li", {}, el("div", { class: "title" }, el("strong", { title: it.model }, nick(it.model) + replica), el("span", { class: "pill" }), talk, unload), el("p", { class: "facts" }),
    meter("Progress"), el("div", { class: "shards" }), el("p", { class: "beside" }, ...["predicted ", "measured "].map((word) => el("span", {}, word, el("b"), " tokens/s"))), el("p", { class: "facts" }));
}

// The names of the nodes that compute now, by rank.
const ranks = (it) => it.computing?.length ? it.computing : it.nodes;

function updateInstance(node, it) {
  const [title, about, progress, shards, beside, more] = node.children;
  const portrait = it.portrait || {};
  text(title.children[1], it.state);
  classed(title.children[1], `pill ${stateKind(it.state)}`);
  title.children[2].hidden = it.state !== "ready";
  title.children[3].hidden = !state.status.may_manage || it.upstream;
  const since = it.since_unix_s ? ` since ${new Date(it.since_unix_s * 1000).toLocaleString()}` : "";
  attr(title.children[1], "title", `${it.state}${since}`);
  text(about, [...(it.stand_ins || []), it.reason].filter(Boolean).join("; ") || it.upstream && it.nodes.join(", ") || `on ${ranks(it).join(", ")} · split ${portrait.split || it.split}${it.numbers && it.numbers !== "cpu" ? ` · ${it.numbers}` : ""}${portrait.drafts ? ` · ${(portrait.drafts.right / portrait.drafts.steps).toFixed(2)} drafts accepted a step` : ""}${it.epoch > 1 ? ` · epoch ${it.epoch}` : ""}`);
  const [done, of] = it.progress || [];
  setMeter(progress, of > 0 && it.state !== "ready" ? done / of : undefined, of > 100000 ? `${bytes(done)} of ${bytes(of)}` : `${done} of ${of}`);
  keyed(shards, portrait.shards || [], (shard) => shard.rank, () => el("span", {}), (part, shard) => {
    const where = ranks(it)[shard.rank] || `rank ${shard.rank}`;
    const share = shard.share < .999 ? ` · ${percent(shard.share)}` : "";
    text(part, `${where}: layers ${shard.first_layer}–${shard.end_layer - 1}${share} · ${bytes(shard.weight_bytes)}`);
    attr(part, "title", `${shard.threads} threads, ${shard.device}`);
    style(part, "flexGrow", String(Math.max(Math.round(shard.weight_bytes / 1e5) / 10, .2)));
  });
  const speeds = [portrait.predicted_tok_s, portrait.measured_tok_s];
  beside.hidden = speeds.every((speed) => speed === undefined);
  speeds.forEach((speed, at) => { beside.children[at].hidden = speed === undefined; text(beside.children[at].children[0], rate(speed)); });
  text(more, [portrait.restarts > 0 && `restarts: ${portrait.restarts}`, (portrait.changes || []).at(-1)].filter(Boolean).join(" · "));
}

export function drawInstances(instances) {
  $("none-loaded").hidden = instances.length > 0;
  keyed($("instances"), instances, (it) => it.id || it.model, makeInstance, updateInstance);
}

async function unloadModel(it, own) {
  if (!confirm(`Unload ${nick(it.model)}? Answers under way end.`)) return;
  own.disabled = true;
  try { await ask("unload", { model: it.id }); await refresh(); } catch (error) { alert(error.message); own.disabled = false; }
}

// ---- downloads

let speeds = new Map(), wereRunning = 0; // bytes and time of the last look, by model

function rateOf(it) {
  const now = performance.now(), before = speeds.get(it.model);
  if (!before || before.done > it.done) { speeds.set(it.model, { done: it.done, at: now, rate: 0 }); return 0; }
  if (now - before.at > 900) {
    const fresh = (it.done - before.done) / (now - before.at) * 1000;
    speeds.set(it.model, { done: it.done, at: now, rate: before.rate ? .7 * before.rate + .3 * fresh : fresh });
  }
  return speeds.get(it.model).rate;
}

function makeDownload(it) {
  const end = button("", async () => { await ask("cancel_pull", { model: it.model }); await refresh(); });
  const again = button("Retry", () => pull(it.model, $("find-said")), { "aria-label": `Retry ${it.model}` });
  const load = button("Load…", () => openLoad(it.model), { "aria-label": `Load ${it.model}` });
  return el("li", {}, el("div", { class: "title" }, el("strong", { title: it.model }, nick(it.model)), el("span", { class: "pill" }), again, load, end), meter("Download"), el("p", { class: "facts" }));
}

export function drawDownloads(downloads) {
  keyed($("downloads"), downloads, (it) => it.model, makeDownload, (node, it) => {
    const [title, progress, about] = node.children, [, word, again, load, end] = title.children;
    const isRunning = it.state === "running";
    text(word, { running: "downloading", done: "here" }[it.state] || it.state);
    classed(word, `pill ${{ done: "good", failed: "bad", cancelled: "warn" }[it.state] || ""}`);
    again.hidden = !["failed", "cancelled"].includes(it.state);
    load.hidden = it.state !== "done";
    text(end, isRunning ? "Cancel" : "Dismiss");
    attr(end, "aria-label", `${end.textContent} ${it.model}`);
    const speed = isRunning ? rateOf(it) : 0;
    const left = speed && it.of > it.done ? `${bytes(speed)}/s, ${seconds((it.of - it.done) / speed)} left` : "";
    setMeter(progress, isRunning && it.of ? it.done / it.of : undefined, `${bytes(it.done)} of ${bytes(it.of)}`);
    text(about, it.reason || (isRunning && (it.of ? left : bytes(it.done))) || "");
  });
  const running = downloads.filter((it) => it.state === "running").length;
  if (running < wereRunning) list();
  wereRunning = running;
}

async function pull(model, said) {
  await inForm(said, "asking", async () => {
    await ask("pull", { model });
    await refresh();
    return `${model} is being fetched: see Downloads above.`;
  });
}

// ---- stored models

export async function list() {
  try {
    stored = (await ask("models")).models;
    drawStored();
    if (catalogue) drawFound();
  } catch (error) { text($("stored-said"), error.message); }
}

function drawStored() {
  $("none-stored").hidden = stored.length > 0;
  keyed($("stored"), stored, (it) => it.name, makeStored, (row, it) => {
    const [title, about] = row.children;
    text(title.children[1], it.problem ? "not whole" : bytes(it.bytes));
    classed(title.children[1], `pill ${it.problem ? "warn" : ""}`);
    title.children[2].hidden = Boolean(it.problem);
    text(about, it.problem || (it.file_count > 1 ? `${it.file_count} files` : ""));
  });
}

function makeStored(it) {
  const remove = button("Delete", () => inForm($("stored-said"), "", () => removeModel(it)), { "aria-label": `Delete ${it.name}` });
  const load = button("Load…", () => openLoad(it.name), { class: "main", "aria-label": `Load ${it.name}` });
  return el("li", {}, el("div", { class: "title" }, el("strong", {}, it.name), el("span", { class: "pill" }), load, remove), el("p", { class: "facts" }));
}

async function removeModel(it) {
  if (!confirm(`Delete ${it.name} from this machine? ${bytes(it.bytes)} become free.`)) return "";
  const { freed_bytes: freed } = await ask("remove", { model: it.name });
  await list();
  return `deleted ${it.name}, ${bytes(freed)} are free`;
}

// ---- loading, with a preview

let wait = null;

function openLoad(model) {
  $("load-form").elements.model.value = model;
  text($("h-load"), `Load ${nick(model)}`);
  $("preview").replaceChildren();
  $("load").showModal();
  showPreview();
}

// The values of the load form, as arguments of its commands.
function wish() {
  const form = new FormData($("load-form"));
  const context = Number(form.get("context"));
  return { model: form.get("model"), count: Number(form.get("count")), split: form.get("split"), ...(context > 0 ? { context } : {}) };
}

const showPreview = () => inForm($("load-said"), "asking where it would lie", preview);

async function preview() {
  const asked = wish(), { placements, notes } = await ask("preview", asked);
  if (JSON.stringify(asked) !== JSON.stringify(wish())) return "";
  $("preview").replaceChildren(...placements.map((it) => el("li", {},
    el("div", { class: "title" }, el("strong", {}, `${it.nodes.join(", ")} · ${it.split}`), el("span", { class: `pill ${it.fits ? "good" : "bad"}` }, it.fits ? "fits" : "too large")),
    el("p", { class: "facts" }, `about ${rate(it.decode_tok_s)} tokens/s${it.ttft_ms == null ? "" : ` · first token ${seconds(it.ttft_ms / 1000)}`} · ${it.nodes.map((node, i) => `${node} ${bytes(it.bytes[i])}`).join(", ")}`))));
  return [placements.length ? "" : "no placement", ...notes].filter(Boolean).join("; ");
}

async function loadModel() {
  await ask("load", wish());
  $("load").close();
  await refresh();
}

// ---- finding: the catalogue at once, the hub when asked

const USES = (it) => it.recommended_for ? `best here for ${it.recommended_for}` : "";
const isHere = (name) => stored.some((it) => it.name === name && !it.problem);

async function listCatalogue() {
  if (catalogue) return;
  catalogue = { models: [] };
  await inForm($("find-said"), "Measuring what fits: half a second the first time.", async () => {
    catalogue = await ask("catalogue");
    const best = (it) => (it.recommended_for ? 0 : it.fits ? 1 : 2);
    catalogue.models.sort((a, b) => best(a) - best(b));
    drawFound();
    return "";
  });
}

function drawFound() {
  const words = $("find").value.trim().toLowerCase(), fitting = $("only-fits").checked;
  const known = catalogue.models.filter((it) => it.name.toLowerCase().includes(words) && (it.fits || !fitting));
  const free = catalogue.free_bytes ? ` · ${bytes(catalogue.free_bytes)} of disk free` : "";
  text($("found-for"), catalogue.cluster ? `For ${catalogue.cluster}${free}` : "");
  const shown = words || showsAll ? known : known.slice(0, FOUND_FIRST);
  $("found-all").hidden = shown.length === known.length;
  text($("found-all"), `Show all ${known.length}`);
  keyed($("found"), shown, (it) => it.name, makeFound, (row, it) => {
    row.firstChild.lastChild.hidden = isHere(it.name);
    row.firstChild.children[2].hidden = !isHere(it.name);
  });
}

// Size, fit and predicted speed of a model that is not here yet.
function fitWords(size, fit) {
  if (!fit) return [bytes(size)];
  return [bytes(size), fit.predicted_decode_tok_s && `about ${rate(fit.predicted_decode_tok_s)} tokens/s predicted${fit.is_of_known_shape === false ? " from its size" : ""}`];
}

const fitPill = (fits) => el("span", { class: `pill ${fits ? "good" : "bad"}` }, fits ? "fits" : "too large");

function makeFound(it) {
  const fetch = button("Download", () => pull(it.name, $("find-said")), { "aria-label": `Download ${it.name}` });
  const load = button("Load…", () => openLoad(it.name), { "aria-label": `Load ${it.name}` });
  const where = it.nodes > 1 ? `over ${it.nodes} machines` : "";
  const about = [USES(it), ...fitWords(it.weight_bytes, it), where, !it.computed && "not computed by this version"];
  return el("li", {}, el("div", { class: "title" }, el("strong", {}, it.name), it.computed ? fitPill(it.fits) : el("span", { class: "pill" }, "not computed"), load, fetch), el("p", { class: "facts" }, about.filter(Boolean).join(" · ")));
}

async function searchHub() {
  const query = $("find").value.trim();
  if (!query) return "Write what to look for.";
  if (/^[^\s/]+\/[^\s/]+$/.test(query)) { $("hub").replaceChildren(makeRepo({ id: query })); return ""; }
  const { models } = await ask("search", { query });
  $("hub").replaceChildren(...models.map(makeRepo));
  return models.length ? "" : `The hub finds nothing for ${query}.`;
}

function makeRepo({ id, downloads, likes }) {
  const parts = el("ul", { class: "cards", "aria-label": `Models of ${id}` }), said = el("p", { class: "facts", role: "status" });
  const show = button("Sizes and fit", () => inForm(said, "asking the hub", () => describe(id, parts)), { "aria-label": `Sizes and fit of ${id}` });
  const counts = downloads === undefined ? "" : `${downloads.toLocaleString()} downloads · ${(likes || 0).toLocaleString()} likes`;
  return el("li", {}, el("div", { class: "title" }, el("strong", {}, id), show), el("p", { class: "facts" }, counts), said, parts);
}

async function describe(id, parts) {
  const told = await ask("describe", { model: id });
  if (told.is_here) { parts.replaceChildren(); return "It is on this machine."; }
  const all = told.choices || [{ model: id, ...told }];
  parts.replaceChildren(...all.map((it) => el("li", {},
    el("div", { class: "title" }, el("strong", {}, it.model), it.fit ? fitPill(it.fit.fits) : null, button("Download", () => pull(it.model, $("find-said")), { "aria-label": `Download ${it.model}` })),
    el("p", { class: "facts" }, [...fitWords(it.bytes, it.fit), it.file_count > 1 && `${it.file_count} files`, it.licence && `licence ${it.licence}`].filter(Boolean).join(" · ")))));
  return "";
}

// ---- beginning

export function shown() {
  if (!state.status?.may_manage) return;
  list();
  listCatalogue();
}

export function begin(look) {
  refresh = look;
  submits("load-form", "load-said", "asking", loadModel);
  $("load-form").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(showPreview, PREVIEW_WAIT_MS); });
  $("load-close").addEventListener("click", () => $("load").close());
  $("find").addEventListener("input", () => catalogue && drawFound());
  $("found-all").addEventListener("click", () => { showsAll = true; drawFound(); });
  $("only-fits").addEventListener("change", () => catalogue && drawFound());
  $("find-form").addEventListener("submit", (event) => { event.preventDefault(); inForm($("find-said"), "asking the hub", searchHub); });
}
