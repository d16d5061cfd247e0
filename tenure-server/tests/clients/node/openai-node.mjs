// openai-node: `runTools`, which calls the tools by itself.
// The session id is a field of the body: `session_id`, beside `model` and `messages`.
import OpenAI from "openai";
import { forecast, locate } from "./tools.mjs";

const tools = [
  tool(locate, "Find the city that a person is in.", "person"),
  tool(forecast, "Look up the weather on a day.", "day"),
];

function tool(run, description, parameter) {
  const parameters = {
    type: "object",
    properties: { [parameter]: { type: "string" } },
    required: [parameter],
  };
  const call = { name: run.name, description, parameters, parse: JSON.parse, function: run };
  return { type: "function", function: call };
}

export function openConversation({ baseUrl, sessionId, user, style, stream }) {
  const defaultHeaders = { "X-Tenure-User": user };
  const client = new OpenAI({ baseURL: baseUrl, apiKey: "none", defaultHeaders });
  let history = [];

  return async function ask(text) {
    const runner = client.chat.completions.runTools({
      model: "default",
      messages: [...history, { role: "user", content: text }],
      tools,
      stream,
      session_id: sessionId,
    });
    const answer = await runner.finalContent();
    if (style === "full") history = runner.messages;
    return answer;
  };
}
