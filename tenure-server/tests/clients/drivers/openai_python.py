"""openai-python: `chat.completions` with a tool loop written by hand."""

from openai import OpenAI

from drivers.tools import SCHEMAS, result_of


class OpenAIPython:
    """The session id is a field of the body: `extra_body={"session_id": …}`."""

    def __init__(self, base_url, session_id=None, user="default", style="append", stream=False):
        headers = {"X-Tenure-User": user}
        self.client = OpenAI(base_url=base_url, api_key="none", default_headers=headers)
        self.extra_body = {"session_id": session_id} if session_id else {}
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
        request = {
            "model": "default",
            "messages": messages,
            "tools": SCHEMAS,
            "extra_body": self.extra_body,
        }
        if not self.stream:
            return self.client.chat.completions.create(**request).choices[0].message
        with self.client.chat.completions.stream(**request) as stream:
            return stream.get_final_completion().choices[0].message

    def close(self):
        self.client.close()
