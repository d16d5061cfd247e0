"""litellm: `completion` with a tool loop written by hand."""

import litellm

from drivers.tools import SCHEMAS, result_of


class LiteLLM:
    """The session id is a field of the body: `extra_body={"session_id": …}`."""

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        self.request = {
            "model": "openai/default",
            "api_base": base_url,
            "api_key": "none",
            "tools": SCHEMAS,
            "extra_headers": {"X-Tenure-User": user},
            "extra_body": {"session_id": session_id} if session_id else {},
        }
        self.style = style
        self.stream = stream
        self.history = []

    def ask(self, text):
        messages = [*self.history, {"role": "user", "content": text}]
        while True:
            message = self.complete(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = result_of(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if self.style == "full":
            self.history = messages
        return message.content

    def complete(self, messages):
        response = litellm.completion(messages=messages, stream=self.stream, **self.request)
        if self.stream:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        return response.choices[0].message

    def close(self):
        pass
