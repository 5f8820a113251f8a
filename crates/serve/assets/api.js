// Requests to the page's own server, and what the modules share.
"use strict";

import { $, classed, text } from "./dom.js";

// `status` is the last answer of /v1/paceline/status.
export const state = { status: null, stages: new Map(), keys: null };

const key = () => sessionStorage.getItem("key");
export const hasKey = () => Boolean(key());

export function headers(more) {
  return key() ? { ...more, Authorization: `Bearer ${key()}` } : { ...more };
}

export async function reason(response) {
  try { return (await response.json()).error.message; } catch { return `status ${response.status}`; }
}

export function post(path, body, signal) {
  return fetch(path, { method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
}

// A command of the node; its answer.
export async function ask(command, body = {}) {
  const response = await post(`/v1/paceline/${command}`, body);
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

export function link(words, kind) {
  text($("link"), words);
  classed($("link"), `pill ${kind}`);
}

export function needKey(said) {
  link("a key is needed", "warn");
  $("login-said").textContent = key() ? said : "";
  if (!$("login").open) $("login").showModal();
}

// Reads server-sent events of a response; `hear` gets the data of each. With `pauseMs` what comes soon after a piece is
// left to gather, so that a busy stream wakes the page some times a second and not for every event.
export async function readEvents(response, hear, pauseMs = 0) {
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
