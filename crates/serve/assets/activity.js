// Activity: requests, speed, where the time of an answer goes, events.
"use strict";

import { headers, reason, state } from "./api.js";
import { $, attr, classed, clock, el, keyed, millis, nick, rate, seconds, stateKind, style, text, way } from "./dom.js";

const KEPT_EVENTS = 200; // rows of the list; the page's memory stays flat
const SPEED_POINTS = 120;
const WATCHED = 4; // models whose stages are looked at
const URGENT = ["node_went", "node_silent", "node_slow"]; // drawn at once

const speeds = [], queue = [];

export function drawRequests(requests) {
  const table = $("requests");
  table.hidden = requests.length === 0;
  $("no-requests").hidden = requests.length > 0;
  // Rows are kept by their place: requests come and go with every look.
  keyed(table.tBodies[0], [...requests.entries()], ([at]) => at,
    () => el("tr", {}, ...Array.from({ length: 8 }, (_, at) => el("td", { class: at > 3 ? "n" : null }))),
    (row, [, it]) => {
      const since = it.age_s - (it.ttft_s ?? 0);
      const stage = `${it.ttft_s === undefined ? "reads" : "writes"}${since >= 0 ? ` ${seconds(since)}` : ""}`;
      [it.request, nick(it.model), it.node || "here", stage, it.prompt_tokens, it.tokens, rate(it.tok_s), seconds(it.ttft_s)]
        .forEach((value, at) => text(row.children[at], String(value)));
    });
}

// ---- stage by stage: while that is open, one model after the other is looked at, for a second or some steps each

const PARTS = [["c", "compute"], ["x", "exchange"], ["w", "wait"], ["o", "other"]];

async function watchStages() {
  for (;;) {
    const isWanted = $("stages").open && !document.hidden && !$("login").open;
    const all = isWanted ? (state.status?.instances || []).filter((it) => it.state === "ready" && !it.upstream).slice(0, WATCHED) : [];
    for (const it of all) await watchOne(it);
    await new Promise((done) => setTimeout(done, all.length ? 1000 : 300)); // ranks send what they recorded: some hundred KB
  }
}

// What it says is drawn with the next look at everything.
async function watchOne(it) {
  try {
    const response = await fetch(`/v1/paceline/stages?instance=${it.id}`, { headers: headers(), signal: AbortSignal.timeout(40_000) });
    state.stages.set(it.id, response.ok ? await response.json() : { problem: await reason(response) });
  } catch { state.stages.set(it.id, { problem: "the node does not answer" }); }
}

export function drawStages(instances) {
  const ready = instances.filter((it) => it.state === "ready" && !it.upstream);
  $("stages").hidden = ready.length === 0;
  for (const id of state.stages.keys()) if (!ready.some((it) => it.id === id)) state.stages.delete(id);
  const looked = ready.filter((it) => state.stages.has(it.id));
  $("stages-said").hidden = looked.length > 0;
  keyed($("stage-list"), looked, (it) => it.id,
    (it) => el("li", {}, el("div", { class: "title" }, el("strong", { title: it.model }, nick(it.model))), el("p", { class: "facts" }), el("div", {}), el("p", { class: "facts" })),
    (node, it) => updateStages(node, it, state.stages.get(it.id)));
}

function updateStages(node, it, look) {
  const [, about, stages, below] = node.children, { steps = 0 } = look, some = steps > 0;
  const step = look.whole_ms / steps;
  text(about, look.problem || (some ? `${look.split} · ${steps} steps of ${millis(step / 1000)}, ${rate(look.tokens / steps)} tokens each` : "nothing is computed"));
  keyed(stages, some ? [...look.ranks.entries()] : [], ([rank]) => rank, makeStage, (row, [rank, its]) => {
    const [label, shares, lane, words] = row.children, per = PARTS.map(([letter, part]) => [letter, part, its[`${part}_ms`] / steps]);
    text(label, `${it.nodes[rank] || `rank ${rank}`}: ${its.name}${its.leads ? ", leads" : ""}`);
    fill(shares, per.map(([letter, , ms]) => [letter, ms]));
    fill(lane, runs(its.lane));
    text(words, per.map(([, part, ms]) => `${part} ${millis(ms / 1000)}`).join(" · "));
  });
  text(below, some ? `Upper bars: a step on average. Lower bars: the last ${millis(look.lane_ms / 1000)} as they were.` : "");
}

const makeStage = () => el("div", { class: "stage" }, el("b", {}), el("div", { class: "lane", "aria-hidden": "true" }), el("div", { class: "lane", "aria-hidden": "true" }), el("span", {}));

// Letters in a row that are the same, as one piece with its length.
function runs(letters) {
  const found = [];
  for (const letter of letters.replaceAll("-", "o")) {
    if (found.at(-1)?.[0] === letter) found.at(-1)[1] += 1; else found.push([letter, 1]);
  }
  return found;
}

function fill(lane, pieces) {
  keyed(lane, [...pieces.entries()], ([at]) => at, () => el("i", {}), (piece, [, [letter, length]]) => {
    classed(piece, letter);
    style(piece, "flexGrow", String(Math.round(length * 1000) / 1000));
  });
}

export function drawSpeed(requests, isShown) {
  speeds.push(requests.reduce((sum, request) => sum + (request.tok_s || 0), 0));
  if (speeds.length > SPEED_POINTS) speeds.shift();
  if (!isShown) return;
  const most = Math.max(...speeds, 1);
  const points = speeds.map((v, at) => `${(240 - 2 * (speeds.length - 1 - at)).toFixed(0)} ${(46 - 42 * v / most).toFixed(1)}`);
  const first = 240 - 2 * (speeds.length - 1);
  if (!$("speed").firstChild) $("speed").append(el("path"));
  attr($("speed").firstChild, "d", `M${first} 48 L${points.join(" L")} L240 48`);
  attr($("speed"), "aria-label", `Tokens a second over the last two minutes: now ${rate(speeds.at(-1))}, most ${rate(Math.max(...speeds))}`);
}

// ---- events

function describe(event) {
  switch (event.kind) {
    case "node_came": return ["good", "came", event.node];
    case "node_silent": return ["warn", "silent", event.node];
    case "node_slow": return ["slow", "slow", `${event.node} answers after ${seconds(event.answer_s)}`];
    case "node_steady": return ["", "steady", `${event.node} answers in time again`];
    case "link_changed": return ["slow", "link", `${event.from} to ${event.to}: ${way(event.now)}, was ${way(event.before)}`];
    case "node_went": return ["bad", "went", event.node];
    case "instance": return [stateKind(event.state), event.state, [nick(event.model), event.nodes.length && `on ${event.nodes.join(", ")}`, event.reason].filter(Boolean).join(" · ")];
    case "split_changed": return ["warn", "split", `${nick(event.model)} ${event.text}`];
    case "fault": return ["bad", "fault", event.text];
    case "managed": return ["", event.action, [event.subject, event.by && `by ${event.by}`].filter(Boolean).join(" ")];
    case "refused": return ["warn", "refused", `${event.code} from ${event.client}`];
    case "key_used": return ["request", "key used", `${event.key} from ${event.client}`];
    case "request_started": return ["request", "asked", `no. ${event.request}, ${event.prompt_tokens} tokens to ${nick(event.model)}`];
    case "unprotected": return ["bad", "unprotected", event.reason];
    case "first_token": return ["request", "first token", `no. ${event.request} after ${seconds(event.ttft_s)}`];
    case "request_ended": return [event.outcome === "failed" ? "bad request" : "request", event.outcome, `no. ${event.request}, ${event.tokens} tokens${event.tok_s ? ` at ${rate(event.tok_s)}/s` : ""}`];
    default: return ["", event.kind, ""];
  }
}

// Whether the event is to be drawn at once.
export function hearEvent(event) {
  queue.push(event);
  if (queue.length > KEPT_EVENTS) queue.shift();
  return URGENT.includes(event.kind);
}

const makeRow = () => el("li", {}, el("time"), el("b"), el("span"));

function fillRow(row, event) {
  const [kind, word, rest] = describe(event), [time, name, words] = row.children;
  classed(row, kind);
  time.dateTime = new Date(event.unix_ms).toISOString();
  text(time, clock(event.unix_ms));
  text(name, word);
  text(words, rest);
}

// Events that came since the last frame, above the others. The oldest rows are used again.
export function drawEvents() {
  const list = $("events"), fresh = document.createDocumentFragment();
  let missing = KEPT_EVENTS - list.childElementCount;
  for (const event of queue.splice(0)) {
    const row = missing > 0 ? makeRow() : list.lastElementChild;
    missing -= 1;
    fillRow(row, event);
    fresh.prepend(row);
  }
  if (fresh.firstChild) list.prepend(fresh);
}

export function begin() {
  $("with-requests").addEventListener("change", () => $("events").classList.toggle("bare", !$("with-requests").checked));
  watchStages();
}
