// Machines: map, links, devices, health, printed lines, pairing, keys.
"use strict";

import { ask, state } from "./api.js";
import { $, attr, button, bytes, classed, clock, copy, el, inForm, keyed, meter, millis, percent, rate, setMeter, stateKind, style, submits, text, way, wayRate } from "./dom.js";

const KEPT_LINKS = 64; // rows of the list: those of eight machines, each with each
const CLOSE = 12; // machines up to which the map has room for large discs and for the links of all pairs
const LABELLED = 6; // machines up to which a line of the map has room for words

export function drawSums(nodes, requests) {
  const alive = nodes.filter((node) => node.state === "alive");
  const samples = alive.map((node) => node.telemetry || {});
  const total = (of) => {
    const known = samples.map(of).filter((value) => value !== undefined);
    return known.length ? known.reduce((a, b) => a + b, 0) : undefined;
  };
  const memory = total((s) => s.memory_bytes), free = total((s) => s.memory_available_bytes);
  const speed = requests.reduce((sum, request) => sum + (request.tok_s || 0), 0);
  const watts = total((s) => s.package_watts);
  const heat = Math.max(...samples.map((s) => s.temperature_c ?? -Infinity));
  const sums = [
    ["Machines", `${alive.length} of ${nodes.length}`],
    ["Being answered", String(requests.length)],
    ["Tokens a second", rate(speed)],
  ];
  if (memory && free !== undefined) sums.push(["Memory in use", `${percent(1 - free / memory)} of ${bytes(memory)}`]);
  if (heat > -Infinity) sums.push(["Hottest", `${heat.toFixed(0)} °C`]);
  if (watts !== undefined) sums.push(["Processors", `${watts.toFixed(0)} W`]);
  const energy = state.status.energy;
  if (energy) sums.push(["Energy a token", `${energy.joules_per_token.toFixed(1)} J`]);
  if (energy?.cost_per_million !== undefined) sums.push(["A million tokens", energy.cost_per_million.toFixed(2)]);
  keyed($("sums"), sums, (sum) => sum[0], (sum) => el("div", {}, el("dt", {}, sum[0]), el("dd", {})),
    (node, sum) => text(node.lastChild, sum[1]));
}

// Where the machines lie on the map: this one in the middle, the others around it.
function spots(n) {
  if (n === 2) return [[120, 92], [280, 92]];
  if (n === 3) return [[200, 44], [80, 140], [320, 140]]; // so that no line runs behind a disc
  const turn = (at) => 2 * Math.PI * (at - 1) / (n - 1) + Math.PI;
  return Array.from({ length: n }, (_, at) => at === 0 ? [200, 92] : [200 + 140 * Math.cos(turn(at)), 92 + 62 * Math.sin(turn(at))]);
}

// Each pair of machines once, with its measured ways: pairs of this machine, and others that were measured.
function pairs(nodes, links) {
  const found = new Map(nodes.slice(1).map((node, at) => [`0 ${at + 1}`, { ends: [0, at + 1], ways: [], off: !node.linked }]));
  const index = new Map(nodes.map((node, at) => [node.name, at]));
  for (const it of links) {
    const ends = [index.get(it.from), index.get(it.to)].sort((a, b) => a - b);
    if (ends.includes(undefined)) continue;
    if (!found.has(ends.join(" "))) found.set(ends.join(" "), { ends, ways: [], off: false });
    const { ways } = found.get(ends.join(" "));
    if (it.from === nodes[0].name) ways.unshift(it); else ways.push(it);
  }
  return [...found.values()];
}

// The share of a way's bandwidth that its interface sends, or models do where that is not known.
const loadOf = (it) => (it.bytes_per_s ? Math.max(it.sent_bytes_s ?? 0, it.model_bytes_s ?? 0) / it.bytes_per_s : 0);

// Bytes a second that models move between two machines, in both directions.
const movedOf = (ways) => ways.reduce((sum, it) => sum + (it.model_bytes_s ?? 0), 0);

export function drawMap(nodes, links) {
  const map = $("map"), n = nodes.length;
  style(map, "display", n > 1 ? "" : "none"); // one machine alone needs no map
  drawLinks(links);
  if (n < 2) return;
  const at = spots(n), r = n > CLOSE ? 12 : 24;
  attr(map, "viewBox", n > 2 ? "0 0 400 200" : "0 58 400 76");
  if (!map.firstChild) map.append(el("g"), el("g"));
  keyed(map.firstChild, pairs(nodes, n > CLOSE ? [] : links), (it) => it.ends.join(" "), makeLine, (line, it) => updateLine(line, it, at, n));
  keyed(map.lastChild, nodes.map((node, index) => ({ node, x: at[index][0], y: at[index][1] })), (it) => it.node.id || it.node.name,
    makeSpot, (spot, it) => updateSpot(spot, it, r));
  attr(map, "aria-label", nodes.map((node) => `${node.name}: ${node.state}${node.linked ? "" : ", no link"}`).join("; "));
}

const makeLine = () => el("g", {}, el("line"), el("text", { class: "way" }), el("text", { class: "way" }));

function updateLine(group, { ends, ways, off }, at, n) {
  const [line, over, under] = group.children;
  const [[x1, y1], [x2, y2]] = ends.map((end) => at[end]);
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) attr(line, name, value.toFixed(1));
  const load = Math.max(0, ...ways.map(loadOf)), isOwn = ends[0] === 0;
  attr(line, "class", off ? "off" : load > .5 ? "busy" : isOwn ? "" : "side");
  style(line, "strokeWidth", load > .01 ? `${Math.round(20 + 40 * Math.min(load, 1)) / 10}px` : "");
  const first = n <= LABELLED ? ways[0] : undefined, moved = movedOf(ways);
  for (const [label, down] of [[over, -4], [under, 11]]) {
    attr(label, "x", ((x1 + x2) / 2).toFixed(1));
    attr(label, "y", ((y1 + y2) / 2 + down).toFixed(1));
  }
  text(over, first && isOwn ? millis(first.latency_s) : "");
  text(under, !first ? "" : moved > 0 ? `${wayRate(moved)} now` : isOwn && first.bytes_per_s !== undefined ? wayRate(first.bytes_per_s) : "");
}

const makeSpot = () => el("g", {}, el("circle", { class: "disc" }), el("path", { class: "load" }), el("text"), el("text"));

function updateSpot(group, { node, x, y }, r) {
  const [disc, load, inside, name] = group.children;
  const isAlive = node.state === "alive", isLarge = r > 12, busy = isAlive ? node.telemetry?.cpu_busy : undefined;
  attr(group, "class", isAlive ? "" : "dead");
  for (const [what, value] of [["cx", x], ["cy", y], ["r", r]]) attr(disc, what, value);
  attr(load, "d", busy === undefined ? "" : arc(x, y, r, busy));
  for (const [label, down] of [[inside, 4], [name, r + 13]]) { attr(label, "x", x); attr(label, "y", y + down); }
  attr(inside, "class", isAlive ? "" : "sub");
  text(inside, !isLarge ? "" : !isAlive ? node.state : busy === undefined ? "" : percent(busy));
  text(name, node.name || "?");
}

// A share of a circle, from the top clockwise.
function arc(x, y, r, share) {
  const turn = 2 * Math.PI * Math.min(share, .999);
  const end = [x + r * Math.sin(turn), y - r * Math.cos(turn)].map((v) => v.toFixed(1));
  return `M${x} ${y - r} A${r} ${r} 0 ${share > .5 ? 1 : 0} 1 ${end[0]} ${end[1]}`;
}

// The measured links in words; the map shows only some of them.
function drawLinks(links) {
  $("links-fold").hidden = links.length === 0;
  keyed($("links"), links.slice(0, KEPT_LINKS), (it) => `${it.from} ${it.to}`, () => el("li", {}, el("b", {}), el("span", {})), (row, it) => {
    const load = loadOf(it), sent = it.sent_bytes_s !== undefined && `sends ${bytes(it.sent_bytes_s)}/s`;
    text(row.firstChild, `${it.from} to ${it.to}`);
    const moved = it.model_bytes_s > 0 && `models move ${bytes(it.model_bytes_s)}/s`;
    text(row.lastChild, [way(it), moved, sent && (load ? `${sent} (${percent(load)})` : sent)].filter(Boolean).join(", "));
  });
}

export function drawNodes(nodes) {
  keyed($("nodes"), nodes, (it) => it.id || it.name, makeNode, updateNode);
}

function makeNode() {
  const remove = button("", () => removeNode(remove), { hidden: true });
  const logs = button("Log", () => showLog(logs.value, logs.dataset.name));
  return el("li", {}, el("div", { class: "title" }, el("strong", {}), el("span", { class: "pill" }), logs, remove), el("p", { class: "facts" }),
    meter("CPU"), meter("Memory"), meter("Swap"), meter("GPU"), meter("Battery"), el("div", { class: "cores", "aria-hidden": "true" }), el("p", { class: "facts" }));
}

function updateNode(node, it) {
  const [title, about, cpu, memory, swap, gpu, battery, cores, more] = node.children;
  const t = it.telemetry || {};
  text(title.firstChild, it.name || "?");
  const isSlow = it.slow_ms !== undefined && it.state === "alive";
  text(title.children[1], it.found_by === "self" && it.state === "alive" ? "this node" : isSlow ? "slow" : it.state);
  classed(title.children[1], `pill ${isSlow ? "warn" : stateKind(it.state)}`);
  const logs = title.children[2];
  logs.hidden = !state.status.may_manage;
  attr(logs, "value", it.id || "");
  attr(logs, "data-name", it.name || "");
  attr(logs, "aria-label", `Log of ${it.name}`);
  const remove = title.lastChild, what = ["dead", "left"].includes(it.state) ? "Forget" : "Revoke";
  remove.hidden = !state.status.may_manage || it.found_by === "self";
  attr(remove, "value", it.id || "");
  text(remove, what);
  attr(remove, "aria-label", `${what} ${it.name}`);
  const devices = (it.devices || []).filter((device) => device.engine !== "cpu");
  text(about, [it.cores && `${it.cores} cores`, it.memory_bytes && bytes(it.memory_bytes), it.instructions, it.build && `version ${it.build}`,
    ...devices.map((device) => [device.engine, device.backend, device.name, device.problem ? `fails: ${device.problem}` : `${bytes(device.placed_bytes || 0)} of ${bytes(device.memory_bytes)}`].filter(Boolean).join(" "))].filter(Boolean).join(" · "));
  setMeter(cpu, t.cpu_busy, `${percent(t.cpu_busy || 0)}${t.cpu_mhz ? ` · ${(t.cpu_mhz / 1000).toFixed(1)} GHz` : ""}`);
  const used = t.memory_bytes && t.memory_available_bytes !== undefined ? t.memory_bytes - t.memory_available_bytes : undefined;
  setMeter(memory, used === undefined ? undefined : used / t.memory_bytes, bytes(used));
  setMeter(swap, t.swap_bytes ? t.swap_used_bytes / t.swap_bytes : undefined, bytes(t.swap_used_bytes));
  const card = (t.gpus || [])[0] || {};
  setMeter(gpu, card.busy, `${percent(card.busy || 0)} · ${bytes(card.memory_used_bytes)}`);
  setMeter(battery, t.battery, `${percent(t.battery || 0)}${t.on_battery ? " · in use" : ""}`);
  const each = (t.core_busy || []).slice(0, 256);
  keyed(cores, each.map((busy, at) => ({ busy, at })), (core) => core.at, () => el("i", {}), (bar, core) => style(bar, "height", `${Math.max(Math.round(core.busy * 100), 6)}%`));
  cores.hidden = each.length < 2;
  const traffic = (t.networks || []).reduce(([down, up], net) => [down + net.received_bytes_s, up + net.sent_bytes_s], [0, 0]);
  const pressure = [["cores", t.cpu_pressure], ["memory", t.memory_pressure], ["disks", t.io_pressure]].filter(([, share]) => share > .05);
  text(more, [
    t.networks && `network ${bytes(traffic[0])}/s in, ${bytes(traffic[1])}/s out`,
    t.disk_read_bytes_s !== undefined && `disks ${bytes(t.disk_read_bytes_s)}/s read, ${bytes(t.disk_write_bytes_s)}/s written`,
    t.temperature_c !== undefined && `${t.temperature_c.toFixed(0)} °C`,
    t.package_watts !== undefined && `${t.package_watts.toFixed(0)} W`,
    ...(t.gpus || []).filter((card) => card.watts !== undefined).map((card) => `GPU ${card.watts.toFixed(0)} W${card.temperature_c ? ` at ${card.temperature_c.toFixed(0)} °C` : ""}${card.throttled ? ", slowed down" : ""}`),
    t.throttled > .01 && `slowed down by heat ${percent(t.throttled)}`,
    ...pressure.map(([what, share]) => `waits for ${what} ${percent(share)}`),
  ].filter(Boolean).join(" · "));
}

// ---- doing

async function removeNode(own) {
  const isRevoked = own.textContent === "Revoke";
  const words = isRevoked ? "Cut this machine off? No machine of the cluster lets it in any more." : "Forget this machine? It may join again with a code.";
  if (!confirm(words)) return;
  try { await ask(isRevoked ? "revoke" : "forget", { node: own.value }); } catch (error) { alert(error.message); }
}

async function joinCluster() {
  const form = new FormData($("join-form"));
  const joined = await ask("join", { code: form.get("code"), peer: form.get("peer") });
  return `in cluster ${joined.cluster}${joined.met.length ? `, met ${joined.met.join(", ")}` : ""}`;
}

export async function listKeys() {
  state.keys = state.keys || [];
  try { state.keys = (await ask("keys", {})).keys; } catch (error) { text($("key-said"), error.message); }
  $("no-keys").hidden = state.keys.length > 0;
  keyed($("keys"), state.keys, (it) => it.id,
    (it) => el("li", {}, el("div", { class: "title" }, el("strong", {}, it.name), el("code", {}, it.id),
      el("button", { type: "button", "aria-label": `Revoke the key of ${it.name}`, onclick: () => inForm($("key-said"), "", () => revokeKey(it)) }, "Revoke"))),
    () => {});
}

async function makeKey() {
  const machines = (state.status.nodes || []).map((it) => it.name).join(", ") || "this machine";
  const words = `This is the first key. From their next start on, ${machines} answer no client without one, not even on the machine itself.`;
  if (state.keys.length === 0 && !state.status.asks_for_keys && !confirm(words)) return "no key was made";
  const made = await ask("new_key", { name: new FormData($("key-form")).get("name") });
  $("key-form").reset();
  await listKeys();
  const later = state.status.asks_for_keys ? "" : ". This node asks for keys from its next start on.";
  const doCopy = button("Copy", () => copy(made.key, doCopy), { "aria-label": "Copy the key" });
  $("key-made").replaceChildren(el("code", {}, made.key), doCopy);
  return `The key is shown only now${later || "."}`;
}

async function revokeKey(it) {
  if (!confirm(`Revoke the key of ${it.name}? Its programs are refused at once.`)) return "";
  await ask("revoke_key", { id: it.id });
  await listKeys();
  return `revoked ${it.name}`;
}

async function invite() {
  try {
    const { code } = await ask("invite", {}), command = `paceline join ${code}`;
    const doCopy = button("Copy", () => copy(command, doCopy), { "aria-label": "Copy the command" });
    $("code").replaceChildren("On the other machine, within five minutes:", el("b", {}, code), el("span", { class: "line" }, el("code", {}, command), doCopy));
  } catch (error) { text($("code"), error.message); }
}

async function checkHealth() {
  const { checks } = await ask("doctor"), order = ["blocked", "missing", "doubtful", "ok", "absent"];
  checks.sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  keyed($("health"), checks, (it) => it.name, (it) => el("li", {}, el("div", { class: "title" }, el("strong", {}, it.name), el("span", {})), el("p", { class: "facts" }), el("code", { class: "mend" })),
    (row, it) => {
      const word = row.firstChild.lastChild;
      text(word, it.state);
      classed(word, `pill ${stateKind(it.state)}`);
      text(row.children[1], it.found);
      row.lastChild.hidden = !it.mend;
      text(row.lastChild, it.mend);
    });
  const gaps = checks.filter((it) => !["ok", "absent"].includes(it.state)).length;
  return gaps ? `${gaps} of ${checks.length} checks of this machine need a look.` : "All is well on this machine.";
}

async function showLog(node, name) {
  text($("h-log"), `Log of ${name}`);
  $("log-lines").replaceChildren();
  $("log").showModal();
  await inForm($("log-said"), "asking", async () => {
    const { lines } = await ask("logs", { node });
    $("log-lines").replaceChildren(...lines.map((it) => el("li", {}, el("time", {}, clock(it.unix_s * 1000)), el("span", {}, it.text))));
    $("log-lines").scrollTop = $("log-lines").scrollHeight;
    return lines.length ? "" : "It has printed nothing yet.";
  });
}

export function begin() {
  $("invite").addEventListener("click", invite);
  $("check-health").addEventListener("click", () => inForm($("health-said"), "checking", checkHealth));
  $("log-close").addEventListener("click", () => $("log").close());
  submits("join-form", "join-said", "joining", joinCluster);
  submits("key-form", "key-said", "", makeKey);
}
