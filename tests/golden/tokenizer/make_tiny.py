#!/usr/bin/env python3
"""Write tiny.jsonl and chat.jsonl beside this file.

    python make_tiny.py GOLDEN_TOKENIZER_FOLDER      (needs HuggingFace tokenizers)

tiny.jsonl: texts and ids of tiny/tokenizer.json and of variants of it, made by HuggingFace tokenizers.
A line: `patch` (members that replace those of the file), text, ids, ids_special, decoded,
decoded_skip_special. chat.jsonl: a few renderings of the project's larger fixtures, made by transformers,
and the published templates (Apache-2.0) they were made with, as templates/qwen3.txt and smollm2.txt.
"""
import copy
import json
import os
import sys

from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = sys.argv[1]
LLAMA3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"


def byte_level(**k):
    return dict({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}, **k)


def sequence(*stages):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(stages)}}


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def token(i, content, **k):
    return dict({"id": 512 + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}, **k)


BOS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
       "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
       "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [510], "tokens": ["<|im_start|>"]}}}


def main():
    base = json.load(open(os.path.join(HERE, "tiny", "tokenizer.json"), encoding="utf-8"))
    added = base["added_tokens"] + [token(0, "<l>", lstrip=True), token(1, "<r>", rstrip=True, special=True), token(2, "wd", single_word=True),
                                    token(3, "e\u0301x", normalized=True), token(4, "ab"), token(5, "abc")]
    patches = [
        {},
        dict(sequence(split({"Regex": LLAMA3}), byte_level()), normalizer=None, post_processor={"type": "Sequence", "processors": [byte_level(), BOS]}),
        sequence({"type": "Digits", "individual_digits": False}, byte_level(add_prefix_space=True, use_regex=True)),
        {"added_tokens": added},
    ] + [sequence(split({"Regex": "[aeiou ]"}, b, i), split({"String": "."}, b, i), byte_level()) for b, i in
         (("Removed", False), ("Isolated", True), ("MergedWithPrevious", False), ("MergedWithNext", False), ("Contiguous", True))]
    texts = ["", " ", "Hello world", "It's 12345 o'CLOCK'S", "caf\u00e9 cafe\u0301", "x\n\n  y \t\r\n", "\u65e5\u672c\u8a9e \U0001f44d\U0001f3fd!!",
             "a<|im_end|>b <|im_start|>", "<l> <l>  <r>  <r> wd wdx xwd wd.", "e\u0301x \u00e9x ab abc abcd", "10\u00a0000 \u3000 \u00bd", "...a.e.i...xyz"]
    with open(os.path.join(HERE, "tiny.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for patch in patches:
            data = copy.deepcopy(base)
            data.update(patch)
            t = Tokenizer.from_str(json.dumps(data))
            for text in texts:
                ids = t.encode(text, add_special_tokens=False).ids
                f.write(json.dumps({"patch": patch, "text": text, "ids": ids, "ids_special": t.encode(text).ids,
                                    "decoded": t.decode(ids, skip_special_tokens=False), "decoded_skip_special": t.decode(ids)}) + "\n")
    want = {("qwen3", c) for c in ("user", "two-turns", "reasoning-content", "white-space", "unicode", "jinja-in-content", "tool-call-and-answer", "tools")}
    want |= {("smollm2", c) for c in ("user", "two-turns", "white-space", "special-in-content")}
    with open(os.path.join(HERE, "chat.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for line in open(os.path.join(GOLDEN, "chat.jsonl"), encoding="utf-8"):
            row = json.loads(line)
            if (row["tok"], row["case"]) in want and row["add_generation_prompt"]:
                del row["ids"]
                f.write(json.dumps(row) + "\n")
    for name in ("qwen3", "smollm2"):
        config = json.load(open(os.path.join(GOLDEN, "..", "..", "tokenizers", name, "tokenizer_config.json"), encoding="utf-8"))
        with open(os.path.join(HERE, "templates", name + ".txt"), "w", encoding="utf-8", newline="\n") as f:
            f.write(config["chat_template"])


if __name__ == "__main__":
    main()
