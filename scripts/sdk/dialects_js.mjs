#!/usr/bin/env node
// Anthropic's, Ollama's and OpenAI's JavaScript clients against a live server's other dialects:
// one line per case, `ok NAME` or `FAILED NAME: why`.
//
// Usage: OPENAI_API_KEY=KEY dialects_js.mjs BASE_URL MODEL FOLDER
//
// MODEL is small and chats; FOLDER has the packages of package.json here in node_modules. Ends
// with 1 when a case failed. `cargo xtask sdk` runs this.

import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, model, folder] = process.argv.slice(2);
const load = createRequire(resolve(folder, "package.json"));
const Anthropic = load("@anthropic-ai/sdk").default;
const OpenAI = load("openai").default;
const { Ollama } = load("ollama");
const KEY = process.env.OPENAI_API_KEY ?? "";
const PATIENCE_MS = 60_000;
const PATIENCE_ALL_MS = 300_000;

const options = { apiKey: KEY || "none", maxRetries: 0, timeout: PATIENCE_MS };
const anthropic = new Anthropic({ baseURL: url, ...options });
const openai = new OpenAI({ baseURL: `${url}/v1`, ...options });
const ollama = new Ollama({ host: url, headers: KEY ? { Authorization: `Bearer ${KEY}` } : {} });
const messages = [{ role: "user", content: "Name three colours of the rainbow." }];
const message = { model, max_tokens: 24, temperature: 0, messages };

function equal(got, expected, what) {
  if (JSON.stringify(got) !== JSON.stringify(expected)) {
    throw new Error(`${what}: got ${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`);
  }
}

/** The error that `action` gives. */
async function refused(action) {
  try {
    await action();
  } catch (error) {
    return error;
  }
  throw new Error("nothing was refused");
}

const cases = {
  async anthropicMessage() {
    const whole = await anthropic.messages.create(message);
    const stream = anthropic.messages.stream(message);
    let said = "";
    stream.on("text", (text) => (said += text));
    const final = await stream.finalMessage();
    equal(said, whole.content[0].text, "streamed text");
    equal(final.content, whole.content, "final content");
    equal(final.stop_reason, whole.stop_reason, "stop reason");
    const counted = await anthropic.messages.countTokens({ model, messages });
    const { input_tokens, cache_read_input_tokens } = whole.usage;
    equal(input_tokens + cache_read_input_tokens, counted.input_tokens, "input tokens");
    const error = await refused(() => anthropic.messages.create({ ...message, model: "opus" }));
    equal(error.constructor, Anthropic.NotFoundError, "class of the error");
  },

  async ollamaChat() {
    const ask = { model, messages, options: { temperature: 0, num_predict: 24 } };
    const whole = await ollama.chat(ask);
    let said = "";
    let last;
    for await (const piece of await ollama.chat({ ...ask, stream: true })) {
      said += piece.message.content;
      last = piece;
    }
    equal(said, whole.message.content, "streamed text");
    equal([last.done, last.eval_count], [true, whole.eval_count], "the last line");
    const names = (await ollama.list()).models.map((one) => one.name);
    equal(names.includes(`${model}:latest`), true, `${model}:latest among ${names}`);
    const error = await refused(() => ollama.show({ model: "llama9" }));
    equal(error.message.includes("llama9"), true, error.message);
  },

  async openaiResponses() {
    const ask = { model, temperature: 0, max_output_tokens: 24, input: "Name a colour." };
    const whole = await openai.responses.create(ask);
    let said = "";
    let completed;
    for await (const event of await openai.responses.create({ ...ask, stream: true })) {
      if (event.type === "response.output_text.delta") said += event.delta;
      if (/^response\.(completed|incomplete)$/.test(event.type)) completed = event.response;
    }
    equal(said, whole.output_text, "streamed text");
    equal(completed.output[0].content[0].text, said, "the completed response");
    const next = { ...ask, input: "And another?", previous_response_id: whole.id };
    const following = await openai.responses.create(next);
    equal(following.previous_response_id, whole.id, "previous response");
    equal(following.usage.input_tokens > whole.usage.input_tokens, true, "a longer prompt");
  },

  async largeBodiesAreSeenRefused() {
    const headers = { "content-type": "application/json", authorization: `Bearer ${KEY}` };
    const body = "x".repeat(20 * 2 ** 20);
    const response = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body });
    equal(response.status, 413, "status");
    equal((await response.json()).error.code, "body_too_large", "code");
  },
};

setTimeout(() => {
  console.log(`FAILED all cases: no end after ${PATIENCE_ALL_MS / 1000} s`);
  process.exit(1);
}, PATIENCE_ALL_MS).unref();

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  const start = Date.now();
  try {
    await run();
    console.log(`ok ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${error.message.replaceAll("\n", " ")}`);
    console.error(error);
  }
}
process.exit(failed ? 1 : 0);
