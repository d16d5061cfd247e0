// Runs conversations with the Node clients for a program in another language. Each line of the
// input is a request in JSON, each line of the output its reply:
//
//   {"open": {"client", "baseUrl", "sessionId", "user", "style", "stream"}} -> {"conversation": 0}
//   {"ask": {"conversation": 0, "text": "…"}}                               -> {"answer": "…"}
import { createInterface } from "node:readline";
import * as openaiNode from "./openai-node.mjs";
import * as vercelAi from "./vercel-ai.mjs";

const clients = { "openai-node": openaiNode, "vercel-ai": vercelAi };
const conversations = [];

async function reply({ open, ask }) {
  if (open) {
    const ask = clients[open.client].openConversation(open);
    return { conversation: conversations.push(ask) - 1 };
  }
  return { answer: await conversations[ask.conversation](ask.text) };
}

for await (const line of createInterface({ input: process.stdin })) {
  const result = await reply(JSON.parse(line)).catch((error) => ({ error: error.stack }));
  console.log(JSON.stringify(result));
}
