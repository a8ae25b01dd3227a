// Vercel's npm package ai, by @ai-sdk/openai-compatible (Chat Completions) and @ai-sdk/openai (Responses).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, CALL, DONE, JSON_CUE, OSLO, Weather, assert, baseURL, model, run } from "./conversations.mjs";

const settings = { name: "spark", baseURL, apiKey: process.env.OPENAI_API_KEY };
const chat = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true })(model);
const responses = createOpenAI(settings).responses(model);
const weather = (cue) => ({
  weather: tool({
    description: "The weather now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city}: 7 degrees, says the ${cue}.`,
  }),
});
const options = (prompt, more) => ({ model: chat, prompt, maxRetries: 0, maxOutputTokens: 200, ...more });
const loop = (cue, more) => options(CALL, { tools: weather(cue), stopWhen: stepCountIs(3), ...more });
const output = Output.object({ schema: Weather });

await run({
  chat: async () => assert.equal((await generateText(options(ANSWER))).text, DONE),
  stream: async () => assert.equal(await streamText(options(ANSWER)).text, DONE),
  tools: async () => assert.equal((await generateText(loop(ANSWER))).text, DONE),
  "structured output": async () => assert.deepEqual((await generateText(options(JSON_CUE, { output }))).output, OSLO),
  "tools with structured output": async () => {
    assert.deepEqual((await generateText(loop(JSON_CUE, { output }))).output, OSLO);
  },
  "Responses: tools": async () => {
    assert.equal((await generateText(loop(ANSWER, { model: responses }))).text, DONE);
  },
  "Responses: tools with structured output": async () => {
    assert.deepEqual((await generateText(loop(JSON_CUE, { model: responses, output }))).output, OSLO);
  },
});
