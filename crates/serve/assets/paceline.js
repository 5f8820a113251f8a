// The dashboard of a paceline node: plain DOM, no framework. It asks three things of its own
// server: /v1/paceline/status once a second, /v1/paceline/events as a stream, and the chat API.
// All text from the server enters the page as text nodes.
"use strict";

const KEPT_EVENTS = 200; // rows of the list; the page's memory stays flat
const LOOK_MS = 1000;
const DRAW_MS = 1200; // longest wait of an event to be drawn: longer than a look's, so that it goes with one
const READ_MS = 200; // between readings of the stream of events while it has much to say
const URGENT = ["node_went", "node_silent", "node_slow"]; // drawn at once
const SPEED_POINTS = 120;
const KEPT_LINKS = 64; // rows of the list: those of eight machines, each with each
const CLOSE = 12; // machines up to which the map has room for large discs and for the links of all pairs
const LABELLED = 6; // machines up to which a line of the map has room for words
const WATCHED = 4; // models whose stages are looked at
const CLOCK = new Intl.DateTimeFormat([], { timeStyle: "medium", hour12: false });

const $ = (id) => document.getElementById(id);
const state = { keys: null, stages: new Map(), status: null, isFresh: false, frame: null, later: null, speed: [], seen: 0, queue: [], talk: [], chat: null };

// ---- small parts

function el(tag, attributes, ...children) {
  const svg = ["svg", "g", "circle", "line", "path", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// These functions set texts, classes, attributes and styles only where they change: the browser works for every setting.
function text(node, value) {
  const only = node.firstChild, words = value ?? "";
  if (!only || only.nextSibling || only.nodeType !== Node.TEXT_NODE) {
    if (node.textContent !== words) node.textContent = words;
  } else if (only.data !== words) only.data = words;
}

function classed(node, names) {
  if (node.className !== names) node.className = names;
}

function attr(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function style(node, name, value) {
  if (node.style[name] !== value) node.style[name] = value;
}

// Keeps one element for each item of a list, by key, in order.
function keyed(parent, items, key, make, update) {
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

function bytes(n) {
  if (n === undefined || n === null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < 4) { n /= 1024; at += 1; }
  return `${n < 10 && at > 0 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

// A model's file goes by its name.
const nick = (model) => (model.startsWith("/") || model.startsWith(".") ? model.split("/").pop() : model);
const percent = (share) => `${Math.round(share * 100)} %`;
const rate = (tokS) => (tokS === undefined || tokS === null ? "–" : tokS.toFixed(tokS < 10 ? 2 : 1));
const seconds = (s) => (s === undefined || s === null ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`);

// Measured ways, as `paceline nodes` writes them.
const MBS = 1e6;
const wayRate = (bytesS) => `${(bytesS / MBS).toFixed(bytesS < 10 * MBS ? 1 : 0)} MB/s`;
const millis = (s) => `${(s * 1000).toFixed(2)} ms`;

function way(it) {
  if (!it) return "no way";
  return [it.interface, millis(it.latency_s), it.bytes_per_s !== undefined && wayRate(it.bytes_per_s)].filter(Boolean).join(", ");
}

// ---- asking the server

const key = () => sessionStorage.getItem("key");

function headers(more) {
  return key() ? { ...more, Authorization: `Bearer ${key()}` } : { ...more };
}

async function reason(response) {
  try { return (await response.json()).error.message; } catch { return `status ${response.status}`; }
}

async function ask(command, body) {
  const response = await fetch(`/v1/paceline/${command}`, {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

function needKey(said) {
  link("a key is needed", "warn");
  $("login-said").textContent = key() ? said : "";
  if (!$("login").open) $("login").showModal();
}

function link(words, kind) {
  text($("link"), words);
  classed($("link"), `pill ${kind}`);
}

async function look() {
  try {
    const response = await fetch("/v1/paceline/status", { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (response.status === 401) return needKey(await reason(response));
    if (!response.ok) throw new Error(await reason(response));
    state.status = await response.json();
    link("live", "good");
    $("logout").hidden = !key();
    state.isFresh = true;
    redraw();
  } catch {
    link("the node does not answer", "bad");
  }
}

async function lookOn() {
  if (!document.hidden && !$("login").open) await look();
  setTimeout(lookOn, LOOK_MS);
}

// Reads server-sent events of a response; `hear` gets the data of each. With `pauseMs` what comes soon after a piece is
// left to gather, so that a busy stream wakes the page some times a second and not for every event.
async function readEvents(response, hear, pauseMs = 0) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const asked = performance.now();
    const { value, done } = await reader.read();
    if (done) return;
    const hadToWait = performance.now() - asked > 2; // else more may lie there already
    const pieces = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      for (const line of piece.split("\n")) if (line.startsWith("data: ")) hear(line.slice(6));
    }
    if (pauseMs && hadToWait) await new Promise((over) => setTimeout(over, pauseMs));
  }
}

async function follow() {
  for (;;) {
    if ($("login").open) { await new Promise((done) => setTimeout(done, 500)); continue; }
    try {
      const response = await fetch(`/v1/paceline/events?after=${state.seen}`, { headers: headers() });
      if (response.ok) await readEvents(response, (data) => hearEvent(JSON.parse(data)), READ_MS);
    } catch { /* the pill says that the node does not answer */ }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

// ---- drawing: all in frames of the browser, so what changes together is drawn once; a hidden page draws nothing

function redraw() {
  clearTimeout(state.later);
  state.later = null;
  state.frame = state.frame || requestAnimationFrame(drawFrame);
}

function redrawSoon() {
  if (!state.frame && !state.later) state.later = setTimeout(redraw, DRAW_MS);
}

function drawFrame() {
  state.frame = null;
  const isFresh = state.isFresh;
  state.isFresh = false;
  drawEvents();
  if (isFresh) draw(state.status);
}

function draw(status) {
  const nodes = status.nodes || [], instances = status.instances || [], requests = status.requests || [];
  text($("where"), [status.name, status.cluster && `cluster ${status.cluster}`, status.version && `version ${status.version}`].filter(Boolean).join(" · "));
  const title = status.name ? `${status.name} – paceline` : "paceline";
  if (document.title !== title) document.title = title;
  keyed($("problems"), status.problems || [], (line) => line, (line) => el("p", {}, line), () => {});
  drawSums(nodes, requests);
  drawMap(nodes, status.links || []);
  keyed($("nodes"), nodes, (node) => node.id || node.name, makeNode, updateNode);
  $("none-loaded").hidden = instances.length > 0;
  keyed($("instances"), instances, (it) => it.id, makeInstance, updateInstance);
  drawRequests(requests);
  drawStages(instances);
  drawSpeed(requests);
  drawModels(instances);
  drawDownloads(status.downloads || []);
  for (const id of ["load", "invite", "join", "key-area"]) $(id).hidden = !status.may_manage;
  if (status.may_manage && !state.keys) listKeys();
  $("no-managing").hidden = status.may_manage;
}

function drawSums(nodes, requests) {
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

function drawMap(nodes, links) {
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
  $("links").hidden = links.length === 0;
  keyed($("links"), links.slice(0, KEPT_LINKS), (it) => `${it.from} ${it.to}`, () => el("li", {}, el("b", {}), el("span", {})), (row, it) => {
    const load = loadOf(it), sent = it.sent_bytes_s !== undefined && `sends ${bytes(it.sent_bytes_s)}/s`;
    text(row.firstChild, `${it.from} to ${it.to}`);
    const moved = it.model_bytes_s > 0 && `models move ${bytes(it.model_bytes_s)}/s`;
    text(row.lastChild, [way(it), moved, sent && (load ? `${sent} (${percent(load)})` : sent)].filter(Boolean).join(", "));
  });
}

function meter(name) {
  return el("div", { class: "meter" }, el("span", {}, name), el("span", { class: "bar" }, el("i", {})), el("span", {}));
}

function setMeter(node, share, words) {
  node.hidden = share === undefined;
  if (share === undefined) return;
  const bar = node.children[1].firstChild;
  style(bar, "width", `${Math.round(Math.min(share, 1) * 1000) / 10}%`);
  classed(bar, share > .97 ? "bad" : share > .88 ? "warn" : "");
  text(node.lastChild, words);
}

function stateKind(word) {
  return { alive: "good", ready: "good", suspect: "warn", recovering: "warn", failed: "bad", dead: "bad" }[word] || "";
}

function makeNode() {
  const remove = el("button", { type: "button", hidden: true, onclick: () => removeNode(remove) });
  return el("li", {}, el("div", { class: "title" }, el("strong", {}), el("span", { class: "pill" }), remove), el("p", { class: "facts" }),
    meter("CPU"), meter("Memory"), meter("Swap"), meter("GPU"), meter("Battery"), el("div", { class: "cores", "aria-hidden": "true" }), el("p", { class: "facts" }));
}

function updateNode(node, it) {
  const [title, about, cpu, memory, swap, gpu, battery, cores, more] = node.children;
  const t = it.telemetry || {};
  text(title.firstChild, it.name || "?");
  const isSlow = it.slow_ms !== undefined && it.state === "alive";
  text(title.children[1], it.found_by === "self" && it.state === "alive" ? "this node" : isSlow ? "slow" : it.state);
  classed(title.children[1], `pill ${isSlow ? "warn" : stateKind(it.state)}`);
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

function makeInstance(it) {
  const unload = el("button", { type: "button", onclick: () => unloadModel(it, unload) }, "Unload");
  unload.setAttribute("aria-label", `Unload ${nick(it.model)}`);
  const replica = it.replica ? ` replica ${it.replica.number}` : "";
  return el("li", {}, el("div", { class: "title" }, el("strong", { title: it.model }, nick(it.model) + replica), el("span", { class: "pill" }), unload), el("p", { class: "facts" }),
    meter("Progress"), el("div", { class: "shards" }), el("p", { class: "beside" }, ...["predicted ", "measured "].map((word) => el("span", {}, word, el("b"), " tokens/s"))), el("p", { class: "facts" }));
}

// The names of the nodes that compute now, by rank.
const ranks = (it) => it.computing?.length ? it.computing : it.nodes;

function updateInstance(node, it) {
  const [title, about, progress, shards, beside, more] = node.children;
  const portrait = it.portrait || {};
  text(title.children[1], it.state);
  classed(title.children[1], `pill ${stateKind(it.state)}`);
  title.children[2].hidden = !state.status.may_manage || it.upstream;
  const since = it.since_unix_s ? ` since ${new Date(it.since_unix_s * 1000).toLocaleString()}` : "";
  attr(title.children[1], "title", `${it.state}${since}`);
  text(about, [...(it.stand_ins || []), it.reason].filter(Boolean).join("; ") || it.upstream && it.nodes.join(", ") || `on ${ranks(it).join(", ")} · split ${portrait.split || it.split}${it.numbers && it.numbers !== "cpu" ? ` · ${it.numbers}` : ""}${it.epoch > 1 ? ` · epoch ${it.epoch}` : ""}`);
  const [done, of] = it.progress || [];
  setMeter(progress, of > 0 && it.state !== "ready" ? done / of : undefined, of > 100000 ? `${bytes(done)} of ${bytes(of)}` : `${done} of ${of}`);
  keyed(shards, portrait.shards || [], (shard) => shard.rank, () => el("span", {}), (part, shard) => {
    const where = ranks(it)[shard.rank] || `rank ${shard.rank}`;
    const share = shard.share < .999 ? ` · ${percent(shard.share)}` : "";
    text(part, `${where}: layers ${shard.first_layer}–${shard.end_layer - 1}${share} · ${bytes(shard.weight_bytes)}`);
    attr(part, "title", `${shard.threads} threads, ${shard.device}`);
    style(part, "flexGrow", String(Math.max(Math.round(shard.weight_bytes / 1e5) / 10, .2)));
  });
  const known = portrait.predicted_tok_s !== undefined || portrait.measured_tok_s !== undefined;
  beside.hidden = !known;
  [portrait.predicted_tok_s, portrait.measured_tok_s].forEach((speed, at) => text(beside.children[at].children[0], rate(speed)));
  text(more, [portrait.restarts > 0 && `restarts: ${portrait.restarts}`, (portrait.changes || []).at(-1)].filter(Boolean).join(" · "));
}

function drawRequests(requests) {
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

function drawStages(instances) {
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

function drawSpeed(requests) {
  state.speed.push(requests.reduce((sum, request) => sum + (request.tok_s || 0), 0));
  if (state.speed.length > SPEED_POINTS) state.speed.shift();
  const most = Math.max(...state.speed, 1);
  const points = state.speed.map((v, at) => `${(240 - 2 * (state.speed.length - 1 - at)).toFixed(0)} ${(46 - 42 * v / most).toFixed(1)}`);
  const first = 240 - 2 * (state.speed.length - 1);
  if (!$("speed").firstChild) $("speed").append(el("path"));
  attr($("speed").firstChild, "d", `M${first} 48 L${points.join(" L")} L240 48`);
  attr($("speed"), "aria-label", `Tokens a second over the last two minutes: now ${rate(state.speed.at(-1))}, most ${rate(Math.max(...state.speed))}`);
}

function drawModels(instances) {
  const answering = instances.filter((it) => it.state === "ready");
  const ready = answering.filter((it, at) => answering.findIndex((other) => other.model === it.model) === at); // once for all replicas
  const choice = $("chat-model");
  keyed(choice, ready, (it) => it.id, (it) => el("option", { value: it.model }, nick(it.model)), () => {});
  if (!state.chat) $("send").disabled = ready.length === 0;
  if (state.talk.length === 0) {
    const words = ready.length ? "Ask the model something." : "Load a model to chat with it.";
    if (!$("talk").firstChild || $("talk").firstChild.textContent !== words) $("talk").replaceChildren(el("p", { class: "empty" }, words));
  }
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
    case "request_started": return ["request", "asked", `no. ${event.request}, ${event.prompt_tokens} tokens to ${nick(event.model)}`];
    case "unprotected": return ["bad", "unprotected", event.reason];
    case "first_token": return ["request", "first token", `no. ${event.request} after ${seconds(event.ttft_s)}`];
    case "request_ended": return [event.outcome === "failed" ? "bad request" : "request", event.outcome, `no. ${event.request}, ${event.tokens} tokens${event.tok_s ? ` at ${rate(event.tok_s)}/s` : ""}`];
    default: return ["", event.kind, ""];
  }
}

function hearEvent(event) {
  if (event.error) return; // the stream ends with it
  state.seen = event.seq;
  state.queue.push(event);
  if (state.queue.length > KEPT_EVENTS) state.queue.shift();
  if (!URGENT.includes(event.kind)) return redrawSoon();
  redraw();
  look();
}

// The time of an event; most have the second of the one before.
let lastSecond = [0, ""];
function clock(ms) {
  const second = Math.floor(ms / 1000);
  if (lastSecond[0] !== second) lastSecond = [second, CLOCK.format(second * 1000)];
  return lastSecond[1];
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
function drawEvents() {
  const list = $("events"), fresh = document.createDocumentFragment();
  let missing = KEPT_EVENTS - list.childElementCount;
  for (const event of state.queue.splice(0)) {
    const row = missing > 0 ? makeRow() : list.lastElementChild;
    missing -= 1;
    fillRow(row, event);
    fresh.prepend(row);
  }
  if (fresh.firstChild) list.prepend(fresh);
}

// ---- doing

async function unloadModel(it, button) {
  if (!confirm(`Unload ${nick(it.model)}? Answers under way end.`)) return;
  button.disabled = true;
  try { await ask("unload", { model: it.id }); await look(); } catch (error) { alert(error.message); button.disabled = false; }
}

async function loadModel() {
  await ask("load", wish());
  $("load").open = false;
  $("preview").replaceChildren();
  await look();
}

async function listModels() {
  if (!$("load").open) return;
  try {
    const { models } = await ask("models", {});
    const size = (model) => bytes(model.bytes) + (model.file_count > 1 ? `, ${model.file_count} files` : "");
    $("models").replaceChildren(...models.map((model) => el("option", { value: model.name }, size(model))));
  } catch (error) { text($("load-said"), error.message); }
}

function drawDownloads(downloads) {
  keyed($("downloads"), downloads, (it) => it.model,
    (it) => el("li", {}, el("div", { class: "title" }, el("strong", { title: it.model }, nick(it.model)), el("span", { class: "pill" })), meter("Download"), el("p", { class: "facts" })),
    (node, it) => {
      const [title, progress, about] = node.children;
      text(title.lastChild, { running: "downloading", done: "here", failed: "failed" }[it.state]);
      title.lastChild.className = `pill ${{ done: "good", failed: "bad" }[it.state] || ""}`;
      setMeter(progress, it.state === "running" && it.of ? it.done / it.of : undefined, `${bytes(it.done)} of ${bytes(it.of)}`);
      text(about, it.reason || (it.state === "running" && !it.of ? bytes(it.done) : ""));
    });
}

// The values of the load form, as arguments of its commands.
function wish() {
  const form = new FormData($("load-form"));
  return { model: form.get("model"), count: Number(form.get("count")), split: form.get("split") };
}

// Says in the form how a command went.
async function inForm(said, words, run) {
  text(said, words);
  try { text(said, (await run()) || ""); } catch (error) { text(said, error.message); }
}

async function preview() {
  const { placements, notes } = await ask("preview", wish());
  $("preview").replaceChildren(...placements.map((it) => el("li", {},
    el("div", { class: "title" }, el("strong", {}, `${it.nodes.join(", ")} · ${it.split}`), el("span", { class: `pill ${it.fits ? "good" : "bad"}` }, it.fits ? "fits" : "too large")),
    el("p", { class: "facts" }, `about ${rate(it.decode_tok_s)} tok/s${it.ttft_ms == null ? "" : ` · first token ${seconds(it.ttft_ms / 1000)}`} · ${it.nodes.map((node, i) => `${node} ${bytes(it.bytes[i])}`).join(", ")}`))));
  return [placements.length ? "" : "no placement", ...notes].filter(Boolean).join("; ");
}

async function removeNode(button) {
  const isRevoked = button.textContent === "Revoke";
  const words = isRevoked ? "Cut this machine off? No machine of the cluster lets it in any more." : "Forget this machine? It may join again with a code.";
  if (!confirm(words)) return;
  try { await ask(isRevoked ? "revoke" : "forget", { node: button.value }); await look(); } catch (error) { alert(error.message); }
}

async function joinCluster() {
  const form = new FormData($("join-form"));
  const joined = await ask("join", { code: form.get("code"), peer: form.get("peer") });
  await look();
  return `in cluster ${joined.cluster}${joined.met.length ? `, met ${joined.met.join(", ")}` : ""}`;
}

async function listKeys() {
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
  return `It is shown only now: ${made.key}${later}`;
}

async function revokeKey(it) {
  if (!confirm(`Revoke the key of ${it.name}? Its programs are refused at once.`)) return "";
  await ask("revoke_key", { id: it.id });
  await listKeys();
  return `revoked ${it.name}`;
}

function submits(form, said, words, run) {
  $(form).addEventListener("submit", (event) => { event.preventDefault(); inForm($(said), words, run); });
}

async function invite() {
  try {
    const { code } = await ask("invite", {});
    $("code").replaceChildren("On the other machine, within five minutes:", el("b", {}, code), el("code", {}, `paceline join ${code}`));
  } catch (error) { text($("code"), error.message); }
}

function addWords(role, words) {
  const node = el("p", { class: role }, words);
  if (state.talk.length === 0 || $("talk").querySelector(".empty")) $("talk").replaceChildren();
  $("talk").append(node);
  $("talk").scrollTop = $("talk").scrollHeight;
  return node;
}

async function sendChat(event) {
  event.preventDefault();
  const words = $("say").value.trim();
  if (!words || state.chat || !$("chat-model").value) return;
  addWords("user", words);
  state.talk.push({ role: "user", content: words });
  $("say").value = "";
  const abort = new AbortController();
  state.chat = abort;
  $("send").hidden = true;
  $("stop").hidden = false;
  $("talk").setAttribute("aria-busy", "true");
  const node = addWords("assistant", "");
  let answer = "";
  try {
    answer = await streamChat(abort.signal, (so_far) => { text(node, so_far); answer = so_far; $("talk").scrollTop = $("talk").scrollHeight; });
  } catch (error) {
    if (error.name !== "AbortError") addWords("error", error.message);
    else text($("chat-said"), "stopped");
  }
  answer = node.textContent;
  if (answer) state.talk.push({ role: "assistant", content: answer });
  else { node.remove(); state.talk.pop(); }
  state.chat = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("talk").removeAttribute("aria-busy");
  $("say").focus();
}

async function streamChat(signal, show) {
  const asked = performance.now();
  const body = { model: $("chat-model").value, messages: state.talk, stream: true, stream_options: { include_usage: true } };
  const post = { method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  let response = await fetch("/v1/chat/completions", post);
  // A node answers for a model some moments after the model's owner is ready.
  for (let again = 0; response.status === 503 && again < 4; again += 1) {
    await new Promise((done) => setTimeout(done, 500));
    response = await fetch("/v1/chat/completions", post);
  }
  if (!response.ok) throw new Error(await reason(response));
  let answer = "", first = 0, tokens = 0;
  text($("chat-said"), "");
  await readEvents(response, (data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    const piece = chunk.choices?.[0]?.delta?.content;
    if (!piece) return;
    first = first || performance.now();
    answer += piece;
    show(answer);
  });
  if (first) {
    const took = (performance.now() - first) / 1000;
    const speed = tokens > 1 && took > 0 ? ` · ${rate((tokens - 1) / took)} tokens/s` : "";
    text($("chat-said"), `${tokens} tokens · first after ${seconds((first - asked) / 1000)}${speed}`);
  }
  return answer;
}

// ---- beginning

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", theme);
  $("theme").setAttribute("aria-label", `Colours: ${theme || "as the system"}`);
  text($("theme"), { light: "☀", dark: "☾" }[theme] || "◐");
}

$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") || "") + 1) % 3]));
$("logout").addEventListener("click", () => { sessionStorage.removeItem("key"); location.reload(); });
$("login-form").addEventListener("submit", () => { sessionStorage.setItem("key", $("key").value.trim()); $("key").value = ""; look(); });
$("login").addEventListener("cancel", (event) => event.preventDefault()); // without a key there is nothing to see
submits("load-form", "load-said", "asking", loadModel);
submits("join-form", "join-said", "joining", joinCluster);
submits("key-form", "key-said", "", makeKey);
$("try").addEventListener("click", () => inForm($("load-said"), "asking", preview));
$("fetch").addEventListener("click", () => inForm($("load-said"), "asking", async () => { await ask("pull", wish()); await look(); }));
$("load").addEventListener("toggle", listModels);
$("invite").addEventListener("click", invite);
$("chat-form").addEventListener("submit", sendChat);
$("say").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) sendChat(event); });
$("stop").addEventListener("click", () => state.chat && state.chat.abort());
$("chat-clear").addEventListener("click", () => { if (state.chat) state.chat.abort(); state.talk = []; $("talk").replaceChildren(); text($("chat-said"), ""); if (state.status) drawModels(state.status.instances || []); });
$("with-requests").addEventListener("change", () => $("events").classList.toggle("bare", !$("with-requests").checked));
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "");
lookOn();
follow();
watchStages();
