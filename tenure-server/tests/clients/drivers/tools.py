"""The two tools that every client offers the model."""

import json


def locate(person: str) -> str:
    """Find the city that a person is in."""
    return "Bern"


def forecast(day: str) -> str:
    """Look up the weather on a day."""
    return {"today": "rain today", "tomorrow": "sun tomorrow"}[day]


def schema(name: str, description: str, parameter: str) -> dict:
    """A tool as OpenAI's API wants it; client libraries make this from a function's signature."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


SCHEMAS = [
    schema("locate", "Find the city that a person is in.", "person"),
    schema("forecast", "Look up the weather on a day.", "day"),
]


def result_of(name: str, arguments: str) -> str:
    """Runs a tool by its name, with the arguments as the model wrote them."""
    tool = {"locate": locate, "forecast": forecast}[name]
    return tool(**json.loads(arguments))
