#!/usr/bin/env python3
"""Prints the questions of a job file beside the answers in its output: show_answers.py JOB OUTPUT"""
import json
import sys


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as f:
        job = [json.loads(line) for line in f if line.strip()]
    with open(sys.argv[2], encoding="utf-8") as f:
        answers = {r["custom_id"]: r for r in map(json.loads, f)}
    for request in job:
        name = request.get("custom_id", request.get("id"))
        body = request.get("body", request)
        question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        print("Q (%s): %s" % (name, question))
        response = answers[name]["response"]
        if response is None or response["status_code"] != 200:
            print("   failed: %s" % json.dumps(answers[name]))
        else:
            for choice in response["body"]["choices"]:
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                print("A: %s  [%s]" % (text.strip(), choice["finish_reason"]))
        print()


main()
