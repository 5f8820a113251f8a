// The dashboard of a paceline node: plain DOM, no framework. It looks at /v1/paceline/status once a second, follows
// /v1/paceline/events, and sends commands and chats to its own server. All text from there enters the page as text nodes.
"use strict";

import * as activity from "./activity.js";
import { hasKey, headers, link, needKey, readEvents, reason, state } from "./api.js";
import * as chat from "./chat.js";
import { $, attr, el, keyed, text } from "./dom.js";
import * as machines from "./machines.js";
import * as models from "./models.js";

const LOOK_MS = 1000;
const DRAW_MS = 1200; // longest wait of an event to be drawn: longer than a look's, so that it goes with one
const READ_MS = 200; // between readings of the stream of events while it has much to say
const VIEWS = ["chat", "models", "machines", "activity"];

let seen = 0, frame = null, later = null, isFresh = false, view = "chat";

async function look() {
  try {
    const response = await fetch("/v1/paceline/status", { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (response.status === 401) return needKey(await reason(response));
    if (!response.ok) throw new Error(await reason(response));
    const isFirst = !state.status;
    state.status = await response.json();
    link("live", "good");
    $("logout").hidden = !hasKey();
    isFresh = true;
    redraw();
    if (isFirst) show();
  } catch {
    link("the node does not answer", "bad");
  }
}

async function lookOn() {
  if (!document.hidden && !$("login").open) await look();
  setTimeout(lookOn, LOOK_MS);
}

export function hearEvent(event) {
  if (event.error) return; // the stream ends with it
  seen = event.seq;
  if (!activity.hearEvent(event)) return redrawSoon();
  redraw();
  look();
}

async function follow() {
  for (;;) {
    if ($("login").open) { await new Promise((done) => setTimeout(done, 500)); continue; }
    try {
      const response = await fetch(`/v1/paceline/events?after=${seen}`, { headers: headers() });
      if (response.ok) await readEvents(response, (data) => hearEvent(JSON.parse(data)), READ_MS);
    } catch { /* the pill says that the node does not answer */ }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

// ---- drawing: all in frames of the browser, so what changes together is drawn once; a hidden view draws nothing

function redraw() {
  clearTimeout(later);
  later = null;
  frame = frame || requestAnimationFrame(drawFrame);
}

function redrawSoon() {
  if (!frame && !later) later = setTimeout(redraw, DRAW_MS);
}

function drawFrame() {
  frame = null;
  const wasFresh = isFresh;
  isFresh = false;
  activity.drawEvents();
  if (wasFresh) draw(state.status);
}

function draw(status) {
  const { nodes = [], instances = [], requests = [], links = [], downloads = [] } = status;
  text($("where"), [status.name, status.cluster && `cluster ${status.cluster}`, status.version && `version ${status.version}`].filter(Boolean).join(" · "));
  const title = status.name ? `${status.name} – paceline` : "paceline";
  if (document.title !== title) document.title = title;
  keyed($("problems"), status.problems || [], (line) => line, (line) => el("p", {}, line));
  for (const part of document.querySelectorAll(".managing")) part.hidden = !status.may_manage;
  for (const part of document.querySelectorAll(".no-managing")) part.hidden = status.may_manage;
  activity.drawSpeed(requests, view === "activity");
  chat.drawChoice();
  if (view === "models") {
    models.drawInstances(instances);
    models.drawDownloads(downloads);
  } else if (view === "machines") {
    $("compute").hidden = !status.compute;
    if (status.compute) attr($("compute-link"), "href", status.compute);
    machines.drawSums(nodes, requests);
    machines.drawMap(nodes, links);
    machines.drawNodes(nodes);
  } else if (view === "activity") {
    activity.drawRequests(requests);
    activity.drawStages(instances);
  }
}

// ---- views

function show() {
  const wanted = location.hash.slice(1);
  view = VIEWS.includes(wanted) ? wanted : "chat";
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    const tab = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) attr(tab, "aria-current", "page"); else tab.removeAttribute("aria-current");
  }
  document.body.dataset.view = view;
  if (!state.status) return;
  if (view === "models") models.shown();
  if (view === "machines" && state.status.may_manage && !state.keys) machines.listKeys();
  isFresh = true;
  redraw();
}

// ---- beginning

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", theme);
  attr($("theme"), "aria-label", `Colours: ${theme || "as the system"}`);
  text($("theme"), { light: "☀", dark: "☾" }[theme] || "◐");
}

$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") || "") + 1) % 3]));
$("logout").addEventListener("click", () => { sessionStorage.removeItem("key"); location.reload(); });
$("login-form").addEventListener("submit", () => { sessionStorage.setItem("key", $("key").value.trim()); $("key").value = ""; look(); });
$("login").addEventListener("cancel", (event) => event.preventDefault()); // without a key there is nothing to see
addEventListener("hashchange", show);
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "");
show();
models.begin(look);
machines.begin();
activity.begin();
chat.begin();
lookOn();
follow();
