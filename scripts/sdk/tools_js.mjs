#!/usr/bin/env node
// OpenAI's, Anthropic's and Ollama's JavaScript clients: tools there and back, and answers of a
// schema. One line per case, `ok NAME` or `FAILED NAME: why`.
//
// Usage: tools_js.mjs BASE_URL MODEL FOLDER
//
// The server is crates/serve/tests/api/standalone.rs, whose model calls the tool `look` and then says
// what it answered. FOLDER has the packages of package.json here in node_modules. Ends with 1 when
// a case failed. `cargo xtask sdk` runs this.

import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, model, folder] = process.argv.slice(2);
const load = createRequire(resolve(folder, "package.json"));
const Anthropic = load("@anthropic-ai/sdk").default;
const OpenAI = load("openai").default;
const { Ollama } = load("ollama");
const PATIENCE_MS = 60_000;

const options = { apiKey: "none", maxRetries: 0, timeout: PATIENCE_MS };
const anthropic = new Anthropic({ baseURL: url, ...options });
const openai = new OpenAI({ baseURL: `${url}/v1`, ...options });
const ollama = new Ollama({ host: url });
const messages = [{ role: "user", content: "How warm is it in Köln?" }];
const city = { type: "string" };
const schema = { type: "object", properties: { city, days: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "look", parameters: schema } }];
const properties = { name: { type: "string" }, age: { type: "integer" } };
const person = { type: "object", properties, required: ["name", "age"] };
const ARGUMENTS = { city: "Köln", days: 3 };
const ADA = { name: "Ada", age: 36 };
const SECOND = "It has 21 degrees.";

function equal(got, expected, what) {
  if (JSON.stringify(got) !== JSON.stringify(expected)) {
    throw new Error(`${what}: got ${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`);
  }
}

const cases = {
  async openaiChat() {
    const stream = openai.chat.completions.stream({ model, messages, tools });
    const choice = (await stream.finalChatCompletion()).choices[0];
    const call = choice.message.tool_calls[0];
    equal(choice.finish_reason, "tool_calls", "finish reason");
    equal([call.function.name, JSON.parse(call.function.arguments)], ["look", ARGUMENTS], "call");
    const result = { role: "tool", tool_call_id: call.id, content: "21" };
    const { parsed, ...said } = choice.message;
    const turn = { role: "assistant", content: said.content, tool_calls: [
      { id: call.id, type: "function", function: { name: "look", arguments: call.function.arguments } },
    ] };
    const turns = [...messages, turn, result];
    const second = await openai.chat.completions.create({ model, messages: turns, tools });
    equal(second.choices[0].message.content, SECOND, "second answer");
    const response_format = { type: "json_schema", json_schema: { name: "p", schema: person } };
    const ada = await openai.chat.completions.create({ model, messages, response_format });
    equal(JSON.parse(ada.choices[0].message.content), ADA, "answer");
  },

  async openaiResponses() {
    const tool = { type: "function", name: "look", parameters: schema, strict: false };
    const ask = { model, input: messages, tools: [tool] };
    const final = await openai.responses.stream(ask).finalResponse();
    const call = final.output.at(-1);
    equal([call.name, JSON.parse(call.arguments)], ["look", ARGUMENTS], "call");
    const output = { type: "function_call_output", call_id: call.call_id, output: "21" };
    const next = { model, input: [output], previous_response_id: final.id, tools: [tool] };
    equal((await openai.responses.create(next)).output_text, SECOND, "second answer");
  },

  async anthropicMessages() {
    const ask = { model, max_tokens: 99, tools: [{ name: "look", input_schema: schema }] };
    const first = await anthropic.messages.stream({ ...ask, messages }).finalMessage();
    const kinds = first.content.map((block) => block.type);
    equal(kinds, ["thinking", "text", "tool_use"], "blocks");
    equal([first.stop_reason, first.content[2].input], ["tool_use", ARGUMENTS], "call");
    const result = { type: "tool_result", tool_use_id: first.content[2].id, content: "21" };
    const turns = [...messages, { role: "assistant", content: first.content },
      { role: "user", content: [result] }];
    const second = await anthropic.messages.create({ ...ask, messages: turns });
    equal(second.content[0].text, SECOND, "second answer");
  },

  async ollamaChat() {
    const whole = await ollama.chat({ model, messages, tools });
    equal(whole.message.tool_calls[0].function.arguments, ARGUMENTS, "arguments");
    const result = { role: "tool", tool_name: "look", content: "21" };
    const turns = [...messages, whole.message, result];
    const second = await ollama.chat({ model, messages: turns, tools });
    equal(second.message.content, SECOND, "second answer");
    const ada = await ollama.chat({ model, messages, format: person });
    equal(JSON.parse(ada.message.content), ADA, "answer");
  },
};

setTimeout(() => {
  console.log("FAILED all: it takes too long");
  process.exit(1);
}, PATIENCE_MS).unref();
let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  const start = Date.now();
  try {
    await run();
    console.log(`ok ${name} with tools (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${String(error).replaceAll("\n", " ")}`);
    console.error(error);
  }
}
process.exit(failed ? 1 : 0);
