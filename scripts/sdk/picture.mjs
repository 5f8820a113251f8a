#!/usr/bin/env node
// The picture of the dashboard in README.md: three nodes of this machine, a model over all of them, and an answer.
//
// Usage: picture.mjs BINARY MODEL.gguf FOLDER [OUT.png, else docs/dashboard.png]
//
// FOLDER has the packages of package.json here in node_modules (the step `sdk` installs them into `test-clients/npm`
// beside the test models). Chromium is /usr/bin/chromium. Takes some 30 s. The picture has at most 256 colours, so it
// is small; a larger one than LARGEST is an error, since git keeps every version.

import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { deflateSync, inflateSync } from "node:zlib";
import { CHROMIUM, PATIENCE_MS, up } from "./nodes.mjs";

const [binary, file, folder, out = resolve(import.meta.dirname, "../../docs/dashboard.png")] = process.argv.slice(2);
const NAMES = ["mini", "studio", "tower"];
const SIZE = { width: 1440, height: 900 }; // README shows it at half of that
const QUESTIONS = ["Why is the sky blue? One sentence.", "Write a Python function that adds two numbers."];
const LARGEST = 160_000;
const COLOURS = 256;
const MODEL = "smollm2.gguf"; // as the page calls the file

/** A command of the dashboard; its answer. */
async function ask(node, command, body) {
  const response = await fetch(`${node.url}/v1/paceline/${command}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(`${command}: ${answer.error.message}`);
  return answer;
}

/** The first status of a node that `holds`. */
async function until(node, what, holds) {
  const begun = performance.now();
  for (;;) {
    const status = await (await fetch(`${node.url}/v1/paceline/status`)).json();
    if (holds(status)) return status;
    if (performance.now() - begun > 2 * PATIENCE_MS) throw new Error(`${what}: not in time`);
    await new Promise((done) => setTimeout(done, 300));
  }
}

/** One cluster, with the model over all its nodes. */
async function prepare([first, ...others]) {
  const model = join(first.home, MODEL);
  copyFileSync(file, model);
  for (const other of others) {
    const { code } = await ask(first, "invite", {});
    await ask(other, "join", { code, peer: `127.0.0.1:${first.port}` });
  }
  await until(first, "the nodes meet", ({ nodes }) => nodes.filter(({ state }) => state === "alive").length === NAMES.length);
  const pairs = NAMES.length * (NAMES.length - 1);
  await until(first, "the links are measured", ({ links }) => links.filter((it) => it.bytes_per_s).length === pairs);
  await ask(first, "load", { model, count: NAMES.length, split: "pipeline", threads: 1 });
  await until(first, "the model is ready", ({ instances }) => instances[0]?.state === "ready");
}

/** The page with an answer of the model over all nodes, as PNG. */
async function shoot(browser, url) {
  const page = await (await browser.newContext({ viewport: SIZE, colorScheme: "light" })).newPage();
  page.setDefaultTimeout(2 * PATIENCE_MS);
  await page.goto(url);
  await page.locator("#send:not([disabled])").waitFor();
  for (const words of QUESTIONS) {
    await page.fill("#say", words);
    await page.press("#say", "Enter");
    await page.locator("#stop:not([hidden])").waitFor();
    await page.locator("#send:not([hidden])").waitFor(); // the answer is whole
  }
  await page.locator("#talk .code").first().waitFor();
  await page.evaluate(() => document.activeElement.blur());
  return page.screenshot();
}

// ---- PNG with a palette: the most frequent colours, and for each other one the nearest of them

/** Width, height and RGB of a picture with eight bits a channel, as Chromium writes it. */
function decode(png) {
  const parts = [], channels = { 2: 3, 6: 4 }[png[25]];
  const [width, height] = [png.readUInt32BE(16), png.readUInt32BE(20)];
  if (png[24] !== 8 || !channels || png[28] !== 0) throw new Error("another kind of PNG than Chromium writes");
  for (let at = 8; at < png.length; at += 12 + png.readUInt32BE(at)) {
    if (png.toString("latin1", at + 4, at + 8) === "IDAT") parts.push(png.subarray(at + 8, at + 8 + png.readUInt32BE(at)));
  }
  const bytes = inflateSync(Buffer.concat(parts)), line = width * channels, rows = Buffer.alloc(line * height);
  for (let y = 0; y < height; y += 1) {
    const filter = bytes[y * (line + 1)];
    for (let x = 0; x < line; x += 1) {
      const at = y * line + x, left = x < channels ? 0 : rows[at - channels], above = y ? rows[at - line] : 0;
      const corner = y && x >= channels ? rows[at - line - channels] : 0;
      rows[at] = bytes[y * (line + 1) + 1 + x] + [0, left, above, (left + above) >> 1, paeth(left, above, corner)][filter];
    }
  }
  const pixels = new Uint32Array(width * height);
  for (let at = 0; at < pixels.length; at += 1) pixels[at] = rows.readUIntBE(at * channels, 3);
  return { width, height, pixels };
}

function paeth(left, above, corner) {
  const [a, b, c] = [left, above, corner].map((value) => Math.abs(left + above - corner - value));
  return a <= b && a <= c ? left : b <= c ? above : corner;
}

/** The colours of the palette, and each colour's index in it. */
function palette(pixels) {
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  const colours = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || a - b).slice(0, COLOURS);
  const rgb = (colour) => [colour >> 16, (colour >> 8) & 255, colour & 255];
  const far = (a, b) => rgb(a).reduce((sum, value, at) => sum + (value - rgb(b)[at]) ** 2, 0);
  const index = new Map(colours.map((colour, at) => [colour, at]));
  for (const colour of counts.keys()) {
    if (!index.has(colour)) index.set(colour, colours.reduce((best, other, at) => (far(other, colour) < far(colours[best], colour) ? at : best), 0));
  }
  return { table: Buffer.from(colours.flatMap(rgb)), index };
}

function crc(bytes) {
  let sum = ~0;
  for (const byte of bytes) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit += 1) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

function chunk(kind, data) {
  const body = Buffer.concat([Buffer.from(kind, "latin1"), data]), whole = Buffer.alloc(body.length + 8);
  whole.writeUInt32BE(data.length, 0);
  body.copy(whole, 4);
  whole.writeUInt32BE(crc(body), body.length + 4);
  return whole;
}

function encode({ width, height, pixels }) {
  const { table, index } = palette(pixels), head = Buffer.alloc(13), rows = Buffer.alloc((width + 1) * height);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 3, 0, 0, 0], 8); // eight bits, a palette
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) rows[y * (width + 1) + 1 + x] = index.get(pixels[y * width + x]);
  }
  const start = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([start, chunk("IHDR", head), chunk("PLTE", table), chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0))]);
}

const { chromium } = createRequire(resolve(folder, "package.json"))("playwright-core");
const homes = NAMES.map(() => mkdtempSync(join(tmpdir(), "picture-")));
const started = await Promise.allSettled(homes.map((home, at) => up(binary, home, NAMES[at])));
const nodes = started.filter(({ value }) => value).map(({ value }) => value);
let browser;
try {
  for (const { reason } of started) if (reason) throw reason;
  await prepare(nodes);
  browser = await chromium.launch(CHROMIUM);
  const small = encode(decode(await shoot(browser, nodes[0].url)));
  if (small.length > LARGEST) throw new Error(`the picture has ${small.length} bytes, more than ${LARGEST}`);
  writeFileSync(out, small);
  console.log(`${out}: ${SIZE.width} x ${SIZE.height}, ${small.length} bytes`);
} finally {
  await browser?.close();
  for (const { child } of nodes) child.kill("SIGTERM");
  await new Promise((done) => setTimeout(done, 500));
  for (const { child } of nodes) child.kill("SIGKILL");
  for (const home of homes) rmSync(home, { recursive: true, force: true });
}
