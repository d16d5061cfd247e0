#!/usr/bin/env python3
"""Prints how well a running server recalls the memories of tenure-server/tests/data/recall.json:

    scripts/evaluate-recall.py http://127.0.0.1:8787 [--set NAME]... [--misses]

Stores each set of the file for a new user, in order, asks its questions, and prints a table by category. A second
table ranks the same results by their similarity alone, if the server makes vectors. The server must accept the header
`x-tenure-user`; TENURE_KEY is its key, if it needs one. Only the standard library is used.
"""

import argparse
import collections
import json
import os
import pathlib
import time
import urllib.error
import urllib.parse
import urllib.request

DATA = pathlib.Path(__file__).resolve().parent.parent / "tenure-server/tests/data/recall.json"
RESULTS = 100  # per question: enough to rank an outdated memory, too


class Server:
    def __init__(self, url, run):
        self.url, self.run = url.rstrip("/"), run
        schema = self.request("GET", "/openapi.json")["components"]["schemas"]["NewMemory"]
        self.accepts_timestamp = "timestamp" in schema["properties"]

    def request(self, method, path, user=None, body=None):
        headers = {"content-type": "application/json"}
        if user:
            headers["x-tenure-user"] = f"{user}-{self.run}"
        if key := os.environ.get("TENURE_KEY"):
            headers["authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{method} {path}: {error.code} {error.read().decode()}") from error

    def remember(self, user, memory):
        body = {"text": memory["text"]}
        if "at" in memory and self.accepts_timestamp:
            body["timestamp"] = memory["at"]
        return self.request("POST", "/memories", user, body)["id"]

    def recall(self, user, question):
        query = urllib.parse.urlencode({"q": question, "limit": RESULTS})
        return self.request("GET", f"/memories/search?{query}", user)


class Measurement:
    """Sums over the questions of a category."""

    def __init__(self):
        self.questions = self.pairs = self.above = 0
        self.recall = 0.0
        self.hits = collections.Counter()

    def add(self, question, found):
        rank = {memory: position for position, memory in enumerate(found, 1)}
        ranks = [rank.get(memory, RESULTS + 1) for memory in question["evidence"]]
        self.questions += 1
        self.recall += sum(r <= 10 for r in ranks) / len(ranks)
        for first in (1, 5, 10):
            self.hits[first] += min(ranks) <= first
        for other in question.get("above", []):
            self.pairs += 1
            self.above += max(ranks) < rank.get(other, RESULTS + 1)
        return ranks

    def row(self):
        shares = [self.recall, self.hits[1], self.hits[5], self.hits[10]]
        above = f"{self.above}/{self.pairs}" if self.pairs else ""
        return f"{self.questions:4}" + "".join(f"{x / self.questions:11.3f}" for x in shares) + f"{above:>9}"


def table(title, rankings):
    """Prints the measurements by category of (question, ids in the order in which they were found)."""
    by_category = collections.defaultdict(Measurement)
    total = Measurement()
    for question, found in rankings:
        by_category[question["category"]].add(question, found)
        total.add(question, found)
    print(f"\n{title:<20}   n  recall@10      hit@1      hit@5     hit@10    above")
    for category, measurement in by_category.items():
        print(f"{category:<20}{measurement.row()}")
    print(f"{'all':<20}{total.row()}")


def report_misses(rankings, texts):
    """Prints the questions whose evidence is not among the first five, or that rank `above` wrongly."""
    print()
    for question, found in rankings:
        single = Measurement()
        ranks = single.add(question, found)
        if min(ranks) > 5 or single.above < single.pairs:
            lower_ranks = [found.index(o) + 1 if o in found else "-" for o in question.get("above", [])]
            ranks = [r if r <= RESULTS else "-" for r in ranks]
            pair = f", above {lower_ranks}" if lower_ranks else ""
            print(f"{question['category']}: {question['text']}  evidence at {ranks}{pair}")
            for position, memory in enumerate(found[:3], 1):
                print(f"    {position}. {texts[memory]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--misses", action="store_true", help="list the questions that were answered badly")
    sets = json.loads(DATA.read_text())["sets"]
    names = [group["name"] for group in sets]
    parser.add_argument("--set", action="append", choices=names, help="only this set; may be repeated")
    options = parser.parse_args()
    server = Server(options.url, f"{time.time_ns():x}")
    rankings, by_similarity, texts, modes = [], [], {}, collections.Counter()
    for group in sets:
        if options.set and group["name"] not in options.set:
            continue
        labels = {server.remember(group["user"], memory): memory["id"] for memory in group["memories"]}
        texts |= {memory["id"]: memory["text"] for memory in group["memories"]}
        for question in group["questions"]:
            answer = server.recall(group["user"], question["text"])
            modes[answer["mode"]] += 1
            rankings.append((question, [labels[hit["id"]] for hit in answer["data"]]))
            near = [hit for hit in answer["data"] if hit.get("similarity") is not None]
            near.sort(key=lambda hit: -hit["similarity"])
            by_similarity.append((question, [labels[hit["id"]] for hit in near]))
    table(", ".join(modes), rankings)
    if "hybrid" in modes:
        table("similarity alone", by_similarity)
    if options.misses:
        report_misses(rankings, texts)


if __name__ == "__main__":
    main()
