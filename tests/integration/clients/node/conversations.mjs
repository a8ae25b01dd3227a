// What conversations.py has for the clients of Python: `node NAME.mjs URL MODEL CUES` prints feature → fault as JSON.
import assert from "node:assert/strict";
import { z } from "zod";

const [, , url, model, cues] = process.argv;
export const { ANSWER, CALL, JSON: JSON_CUE, DONE } = JSON.parse(cues);
export const baseURL = `${url}/v1`;
export { model, assert };
export const Weather = z.object({ city: z.string(), degrees: z.number().int() });
export const OSLO = { city: "Oslo", degrees: 7 };

export async function run(features) {
  const outcome = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      await feature();
      outcome[name] = "";
    } catch (error) {
      outcome[name] = String(error?.stack ?? error).slice(0, 2000);
    }
  }
  console.log(JSON.stringify(outcome));
}
