// Vercel's AI SDK: `generateText` and `streamText` with several steps.
// The session id is a header of each call, `X-Session-Id`: one provider serves all sessions.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { forecast, locate } from "./tools.mjs";

const tools = {
  locate: tool({
    description: "Find the city that a person is in.",
    inputSchema: z.object({ person: z.string() }),
    execute: locate,
  }),
  forecast: tool({
    description: "Look up the weather on a day.",
    inputSchema: z.object({ day: z.string() }),
    execute: forecast,
  }),
};

export function openConversation({ baseUrl, sessionId, user, style, stream }) {
  const headers = { "X-Tenure-User": user };
  const provider = createOpenAICompatible({ name: "tenure", baseURL: baseUrl, headers });
  let history = [];

  return async function ask(text) {
    const messages = [...history, { role: "user", content: text }];
    const request = {
      model: provider("default"),
      system: "You know the weather.",
      messages,
      tools,
      stopWhen: stepCountIs(5),
      headers: sessionId ? { "X-Session-Id": sessionId } : {},
    };
    const result = stream ? streamText(request) : await generateText(request);
    const answer = await result.text;
    if (style === "full") history = [...messages, ...(await result.response).messages];
    return answer;
  };
}
