#!/usr/bin/env node
// OpenAI's JavaScript SDK against a live server: one line per case, `ok NAME` or
// `FAILED NAME: why`.
//
// Usage: OPENAI_API_KEY=KEY openai_js.mjs BASE_URL MODEL FOLDER
//
// BASE_URL is that of the server, http://127.0.0.1:52415; MODEL is SmolLM2 135M, with a context of
// 8192 tokens; FOLDER has the package `openai` in node_modules, in the version of package.json
// here. Nothing else may use the server meanwhile. With a key the server must ask for keys,
// without one it must not. Ends with 1 when a case failed. `cargo xtask sdk` runs this.

import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, model, folder] = process.argv.slice(2);
const OpenAI = createRequire(resolve(folder, "package.json"))("openai").default;
const KEY = process.env.OPENAI_API_KEY ?? "";

// Longest time of one request, and of all cases: some ten times what two cores take.
const PATIENCE_MS = 60_000;
const PATIENCE_ALL_MS = 300_000;
// Places for requests that the server has by default (Limits in crates/serve/src/config.rs).
const PLACES = 64;
const CONTEXT = 8192;
const GREETING = [{ role: "user", content: "Hi" }];
const QUESTION = [{ role: "user", content: "Name three colours of the rainbow." }];
const STORY = [
  { role: "user", content: "Tell me a very long story about a lighthouse keeper." },
];
// The tokens that end an answer of SmolLM2, forbidden.
const NO_END = { 0: -100, 2: -100 };
const PROMPT = "The capital of France is";

/** A client that does not repeat what failed. */
const connect = (options = {}) =>
  new OpenAI({
    baseURL: `${url}/v1`,
    apiKey: KEY || "none",
    maxRetries: 0,
    timeout: PATIENCE_MS,
    ...options,
  });
const client = connect();

/** A chat completion, at temperature 0 and of 24 tokens unless told otherwise. */
const chat = (options = {}, request = {}) =>
  client.chat.completions.create(
    { model, messages: QUESTION, temperature: 0, max_tokens: 24, ...options },
    request,
  );
/** A text completion, likewise. */
const complete = (options = {}) =>
  client.completions.create({ model, prompt: PROMPT, temperature: 0, max_tokens: 24, ...options });

const show = (value) => JSON.stringify(value);

function equal(got, expected, what = "value") {
  if (show(got) !== show(expected)) {
    throw new Error(`${what}: got ${show(got)}, expected ${show(expected)}`);
  }
}

function differs(one, other, what) {
  if (show(one) === show(other)) throw new Error(`${what}: both are ${show(one)}`);
}

function holds(condition, what) {
  if (!condition) throw new Error(`not so: ${what}`);
}

/** Runs `action`, which must end with an error of exactly this class; checks its fields. */
async function refused(kind, action, { param, code } = {}) {
  let error;
  try {
    await action();
  } catch (caught) {
    error = caught;
  }
  holds(error?.constructor === kind, `${kind.name} is thrown, ${error} is`);
  if (param !== undefined) equal(error.param, param, `param of ${error.message}`);
  if (code !== undefined) equal(error.code, code, `code of ${error.message}`);
  return error;
}

/** What a choice of a whole answer says. */
const text = (answer, index = 0) =>
  answer.choices[index].text ?? answer.choices[index].message.content;

/** The texts of a stream's choices, their finish reasons and the chunks. */
async function pieces(stream) {
  const [texts, ends, chunks] = [{}, {}, []];
  for await (const chunk of await stream) {
    chunks.push(chunk);
    for (const { index, text, delta, finish_reason } of chunk.choices) {
      holds(!(index in ends), "no text after the end");
      texts[index] = (texts[index] ?? "") + (text ?? delta?.content ?? "");
      if (finish_reason) ends[index] = finish_reason;
    }
  }
  return { texts, ends, chunks };
}

/** A gauge of /metrics. */
async function figure(name) {
  const headers = KEY ? { Authorization: `Bearer ${KEY}` } : {};
  const response = await fetch(`${url}/metrics`, { headers });
  return Number(new RegExp(`^paceline_${name} (\\S+)$`, "m").exec(await response.text())[1]);
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Waits until `done`; fails after some seconds. */
async function until(what, done, limitMs = 10_000) {
  const start = Date.now();
  while (!(await done())) {
    holds(Date.now() - start < limitMs, `${what} within ${limitMs} ms`);
    await pause(20);
  }
}

const idle = (limitMs) =>
  until(
    "nothing is in work",
    async () =>
      (await figure("requests_in_flight")) === 0 && (await figure("sequences_running")) === 0,
    limitMs,
  );

const cases = {
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    equal(listed, [model]);
    equal((await client.models.retrieve(model)).id, model);
    const code = "model_not_found";
    await refused(OpenAI.NotFoundError, () => client.models.retrieve("gpt-4"), { code });
  },

  async chat_whole() {
    const answer = await chat();
    equal([answer.object, answer.model], ["chat.completion", model]);
    equal(answer.choices[0].message.role, "assistant");
    holds(text(answer).trim().length > 0, "some text");
    equal(text(await chat()), text(answer), "the same again at temperature 0");
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    equal(total_tokens, prompt_tokens + completion_tokens, "sum of the usage");
  },

  async chat_streamed_is_whole() {
    const whole = await chat();
    const { texts, ends, chunks } = await pieces(chat({ stream: true }));
    equal([texts, ends], [{ 0: text(whole) }, { 0: whole.choices[0].finish_reason }]);
    holds(chunks.length > 5, "text in pieces");
    equal(chunks[0].choices[0].delta.role, "assistant");
  },

  async chat_stream_helper() {
    const options = { model, messages: GREETING, temperature: 0, max_tokens: 48 };
    const stream = client.chat.completions.stream(options);
    let said = "";
    stream.on("content", (delta) => (said += delta));
    const final = await stream.finalChatCompletion();
    equal(said, text(final), "before the end");
    equal(said, text(await chat({ messages: GREETING, max_tokens: 48 })), "whole");
  },

  async completion_whole_and_streamed() {
    const whole = await complete();
    holds(text(whole).includes("Paris"), `Paris in ${text(whole)}`);
    const { texts, ends } = await pieces(complete({ stream: true }));
    equal([texts, ends], [{ 0: text(whole) }, { 0: whole.choices[0].finish_reason }]);
    const both = await complete({ prompt: [PROMPT, "One, two, three,"] });
    equal([text(both), both.choices[1].index], [text(whole), 1], "two prompts");
  },

  async stop_texts() {
    for (const [ask, stop] of [[chat, " "], [complete, ["\n", ".", " the"]]]) {
      const free = text(await ask());
      const at = Math.min(...[stop].flat().map((s) => free.indexOf(s)).filter((i) => i >= 0));
      const answer = await ask({ stop });
      equal(text(answer), free.slice(0, at), "text before the first of the stop texts");
      equal(answer.choices[0].finish_reason, "stop");
      const { texts, ends } = await pieces(ask({ stop, stream: true }));
      equal([texts[0] ?? "", ends], [free.slice(0, at), { 0: "stop" }], "streamed");
    }
  },

  async limits_of_length() {
    for (const limit of [{ max_tokens: 5 }, { max_tokens: undefined, max_completion_tokens: 5 }]) {
      const answer = await chat({ messages: STORY, ...limit });
      equal([answer.choices[0].finish_reason, answer.usage.completion_tokens], ["length", 5]);
    }
  },

  async logprobs_of_chat() {
    const answer = await chat({ logprobs: true, top_logprobs: 5 });
    const entries = answer.choices[0].logprobs.content;
    equal(Buffer.from(entries.flatMap((entry) => entry.bytes)).toString(), text(answer), "bytes");
    for (const { token, logprob, top_logprobs: top } of entries) {
      equal(top.length, 5, "alternatives");
      equal([top[0].token, top[0].logprob], [token, logprob], "the chosen first");
      const sum = top.reduce((sum, one) => sum + Math.exp(one.logprob), 0);
      holds(sum <= 1 + 1e-4, `probabilities sum to ${sum}`);
    }
    const { chunks } = await pieces(chat({ logprobs: true, top_logprobs: 5, stream: true }));
    const parts = chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []);
    equal(parts, entries, "streamed");
  },

  async logprobs_of_completion() {
    const answer = await complete({ logprobs: 3 });
    const { tokens, token_logprobs, top_logprobs } = answer.choices[0].logprobs;
    equal(tokens.join(""), text(answer), "tokens");
    top_logprobs.forEach((top, i) => {
      equal(Math.max(...Object.values(top)), token_logprobs[i], "the chosen is the most probable");
      const sum = Object.values(top).reduce((sum, logprob) => sum + Math.exp(logprob), 0);
      holds(sum <= 1 + 1e-4, `probabilities sum to ${sum}`);
    });
  },

  async several_choices() {
    const options = { n: 3, temperature: 1, seed: 7, max_tokens: 16 };
    for (const ask of [chat, complete]) {
      const answer = await ask(options);
      const texts = [0, 1, 2].map((i) => text(answer, i));
      equal(new Set(texts).size, 3, "different choices");
      const streamed = await pieces(ask({ ...options, stream: true }));
      equal([0, 1, 2].map((i) => streamed.texts[i]), texts, "streamed");
      equal(text(await ask({ ...options, n: 1, seed: 8 })), texts[1], "choice 1 by its seed");
    }
  },

  async seeds() {
    const said = async (seed) => text(await chat({ messages: STORY, temperature: 1, seed }));
    equal(await said(1), await said(1), "one seed");
    differs(await said(1), await said(2), "two seeds");
    differs(await said(undefined), await said(undefined), "without a seed");
  },

  async sampling() {
    const said = async (options) => text(await complete({ seed: 3, ...options }));
    const greedy = await said({ temperature: 0 });
    differs(await said({ temperature: 1.5 }), greedy, "a high temperature");
    equal(await said({ temperature: 1.5, top_p: 1e-6 }), greedy, "top_p that leaves one token");
    equal(await said({ temperature: 1.5, top_k: 1 }), greedy, "top_k of one");
    const prompt = Array(10).fill("ha").join(" ");
    const words = async (options) =>
      new Set(text(await complete({ prompt, ...options })).split(/\s+/)).size;
    const repeated = await words();
    holds((await words({ frequency_penalty: 2 })) > 2 * repeated, "frequency_penalty varies");
    const comma = text(await complete({ prompt: [28], echo: true, max_tokens: 0 }));
    equal(text(await chat({ logit_bias: { 28: 100 }, max_tokens: 4 })), comma.repeat(4), "bias");
  },

  async usage_of_streams() {
    for (const ask of [chat, complete]) {
      await ask({ n: 2 });
      // The second time the prompt is in the cache, as it is the third time.
      const { usage } = await ask({ n: 2 });
      const options = { n: 2, stream: true, stream_options: { include_usage: true } };
      const { chunks } = await pieces(ask(options));
      const last = chunks.pop();
      equal([last.choices, last.usage], [[], usage], "last chunk");
      holds(chunks.every((chunk) => chunk.usage === null), "no usage before the end");
    }
  },

  async wrong_fields_are_named() {
    for (const [options, param, code] of [
      [{ foo: 1 }, "foo", "unknown_parameter"],
      [{ response_format: { type: "xml" } }, "response_format.type", "unsupported_parameter"],
      [
        { tools: [{ type: "function", function: { name: "f" } }] },
        "tools",
        "unsupported_parameter",
      ],
      [{ temperature: 2.5 }, "temperature", "invalid_value"],
      [{ n: 17 }, "n", "invalid_value"],
      [{ max_tokens: "9" }, "max_tokens", "invalid_type"],
      [{ top_logprobs: 3 }, "top_logprobs", "conflicting_parameters"],
      [{ messages: [] }, "messages", "invalid_value"],
    ]) {
      for (const stream of [false, true]) {
        const ask = () => chat({ ...options, stream });
        await refused(OpenAI.BadRequestError, ask, { param, code });
      }
    }
    const param = "suffix";
    await refused(OpenAI.BadRequestError, () => complete({ suffix: "x" }), { param });
  },

  async prompt_over_the_context() {
    const messages = [{ role: "user", content: "word ".repeat(CONTEXT) }];
    const code = "context_length_exceeded";
    await refused(OpenAI.BadRequestError, () => chat({ messages }), { code });
    const prompt = Array(CONTEXT).fill(5);
    await refused(OpenAI.BadRequestError, () => complete({ prompt }), { code });
  },

  async wrong_model() {
    for (const ask of [chat, complete]) {
      const fields = { param: "model", code: "model_not_found" };
      await refused(OpenAI.NotFoundError, () => ask({ model: "gpt-4" }), fields);
    }
  },

  async keys_are_asked_for() {
    const other = connect({ apiKey: "sk-wrong" });
    if (!KEY) return equal((await other.models.list()).data.length, 1, "any key is accepted");
    const ask = () => other.chat.completions.create({ model, messages: QUESTION });
    await refused(OpenAI.AuthenticationError, ask, { code: "invalid_api_key" });
  },

  async leaving_ends_the_answer() {
    const endless = { messages: STORY, max_tokens: 4000, logit_bias: NO_END };
    // By leaving the loop, by aborting a stream, by aborting a whole answer.
    for await (const chunk of await chat({ ...endless, stream: true })) {
      if (chunk.choices[0].delta.content) break;
    }
    await idle(2000);
    const stream = await chat({ ...endless, stream: true });
    equal(await figure("requests_in_flight"), 1, "requests in flight");
    stream.controller.abort();
    await idle(2000);
    const abort = new AbortController();
    const whole = chat(endless, { signal: abort.signal });
    const ended = refused(OpenAI.APIUserAbortError, () => whole);
    await until("it runs", async () => (await figure("sequences_running")) === 1);
    abort.abort();
    await ended;
    await idle(2000);
  },

  async timeout_ends_the_answer() {
    const options = { messages: STORY, max_tokens: 4000, logit_bias: NO_END };
    const ask = () => chat(options, { timeout: 500 });
    await refused(OpenAI.APIConnectionTimeoutError, ask);
    await idle(2000);
  },

  async twenty_streams_at_once() {
    const expected = text(await chat({ max_tokens: 16 }));
    const one = async () => (await pieces(chat({ max_tokens: 16, stream: true }))).texts[0];
    const got = await Promise.all(Array.from({ length: 20 }, one));
    equal(got, Array(20).fill(expected), "the answer of one alone, twenty times");
  },

  async flood_is_limited() {
    await idle();
    const options = { messages: STORY, max_tokens: 2000, stream: true, logit_bias: NO_END };
    const asked = Array.from({ length: PLACES + 16 }, () => chat(options));
    const outcomes = await Promise.allSettled(asked);
    const taken = outcomes.filter((one) => one.status === "fulfilled").map((one) => one.value);
    const errors = outcomes.filter((one) => one.status === "rejected").map((one) => one.reason);
    equal([taken.length, errors.length], [PLACES, 16], "taken and refused");
    for (const error of errors) {
      holds(error.constructor === OpenAI.RateLimitError, `a RateLimitError: ${error}`);
      equal(error.code, "server_busy");
    }
    taken.forEach((stream) => stream.controller.abort());
    await idle();
    holds(text(await chat()).length > 0, "an answer after the flood");
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
