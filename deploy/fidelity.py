#!/usr/bin/env python3
"""Compares KV compression settings with the full cache on a real model and writes a markdown table.

    deploy/fidelity.py --model DIR [--out FILE]

One command, five parts, all of them on this machine's CPU:
 1. The engine answers questions with the full cache; the answers go on to --tokens tokens (the end of
    the text is not allowed before), sampled with a seed. These are the texts to replay.
 2. Probes: a passcode is stated early in the generated part of such a text, --filler tokens of other
    answers follow, then the beginning of a sentence that asks for it.
 3. zipage-fidelity replays texts and probes through the full cache and through every setting at every
    budget, and compares the predictions of the next token.
 4. The engine answers --free_number questions freely under every setting; counted are lengths and
    repetition loops (a --ngram of tokens that occurs --repeats times or more).
 5. The table.
Needs Python 3 and the built programs, nothing else. About 25 minutes of CPU time with a model of 0.5B
parameters, by estimate from a somewhat smaller run; on a machine that is busy with other work that run took
85 minutes.
"""
import argparse
import collections
import datetime
import hashlib
import json
import os
import pathlib
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
STATEMENT = "\n\nNote for later: the passcode is %s. I will need it at the end.\n\n"
QUESTION = "\n\nNow the note from the beginning is needed: the passcode is"
# Name and options of every setting; the full cache is what all are compared with.
SETTINGS = [
    ("paper, lambda 0.2", "compression_policy=paper,similarity_lambda=0.2"),
    ("paper, lambda 0.2, pinned", "compression_policy=paper,similarity_lambda=0.2,pin_prompt=on"),
    ("paper, lambda 0.5", "compression_policy=paper,similarity_lambda=0.5"),
    ("paper, lambda 0.5, pinned", "compression_policy=paper,similarity_lambda=0.5,pin_prompt=on"),
    ("pinned_score, share 0.25", "compression_policy=pinned_score,score_share=0.25"),
    ("pinned_score, share 1", "compression_policy=pinned_score,score_share=1"),
    ("pinned_random", "compression_policy=pinned_random"),
    ("recency", "compression_policy=recency"),
    ("recency, pinned", "compression_policy=recency,pin_prompt=on"),
]


def cell(setting, budget):
    return "%s @ %s" % (setting, budget)


def log(text):
    print("[%s] %s" % (time.strftime("%H:%M:%S"), text), file=sys.stderr, flush=True)


def write_lines(path, rows):
    with open(path, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")


def read_questions(path):
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("question"), str):
            raise SystemExit("%s: question %d has no \"question\"; give JSON Lines with one each" % (path, number))
    return rows


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit("%s\nended with status %d:\n%s" % (shlex.join(command), done.returncode, done.stderr.strip()))
    return done.stdout


class Programs:
    def __init__(self, a, folder):
        self.a, self.folder = a, folder
        self.common = ["--model", a.model, "--device", "cpu", "--dtype", a.dtype, "--kvcache_block_size",
                       str(a.block_size), "--cpu_threads", str(a.threads)]

    def engine(self, name, requests, options=""):
        """Runs a job; the response bodies in the order of the requests."""
        job, out = (os.path.join(self.folder, "%s.%s.jsonl" % (name, kind)) for kind in ("job", "out"))
        for i, request in enumerate(requests):
            request["id"] = str(i)
        write_lines(job, requests)
        flags = ["--" + option for option in options.split(",") if option]
        # Every run does the same work whatever ran before it.
        run([self.a.bin + "/zipage-launch", *self.common, "--job", job, "--output", out, "--overwrite", "--quiet",
             "--no_enable_prefix_cache", "--run_dir", os.path.join(self.folder, "run"), *flags])
        with open(out, encoding="utf-8") as f:
            rows = {int(row["custom_id"]): row["response"]["body"] for row in map(json.loads, f)}
        return [rows[i] for i in range(len(requests))]

    def fidelity(self, name, cases):
        """Replays the cases at all budgets and settings: the entries of the report, by cell()."""
        path, report = (os.path.join(self.folder, "%s.%s" % (name, kind)) for kind in ("jsonl", "report.json"))
        write_lines(path, cases)
        command = [self.a.bin + "/zipage-fidelity", *self.common, "--input", path, "--json", report]
        keys = {}
        for budget in self.a.budgets:
            for setting, options in SETTINGS:
                key = "s%d" % len(keys)
                keys[key] = cell(setting, budget)
                blocks = budget // self.a.block_size
                command += ["--setting", "%s:%s,max_cache_blocks_per_seq=%d" % (key, options, blocks)]
        run(command)
        with open(report, encoding="utf-8") as f:
            return {keys[entry["name"]]: entry for entry in json.load(f)["settings"]}


def messages(row):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]


def ask(row, i, a, max_tokens, **more):
    return {"messages": messages(row), "max_tokens": max_tokens, "temperature": a.temperature, "seed": a.seed + i,
            "return_token_ids": True, **more}


class Parts:
    """Results of the parts of a run, kept in a folder."""

    def __init__(self, programs):
        self.programs, self.seconds = programs, 0

    def make(self, name, make, *depends):
        """make(), or what an earlier run in the same folder made of the same arguments."""
        key = hashlib.sha256(json.dumps([self.programs.common, SETTINGS, name, depends]).encode()).hexdigest()[:12]
        path = os.path.join(self.programs.folder, "part.%s.json" % key)
        if not os.path.exists(path):
            log(name)
            start = time.time()
            part = {"name": name, "value": make(), "seconds": time.time() - start}
            with open(path + ".new", "w", encoding="utf-8") as f:
                json.dump(part, f)
            os.replace(path + ".new", path)
        with open(path, encoding="utf-8") as f:
            part = json.load(f)
        self.seconds += part["seconds"]
        return part["value"]


def make_texts(programs, questions, a):
    rows = [questions[i % len(questions)] for i in range(a.number)]
    requests = [ask(row, i, a, a.tokens, min_tokens=a.tokens) for i, row in enumerate(rows)]
    bodies = programs.engine("texts", requests, "compression_policy=none")
    return [{"id": "text-%d" % i, "prompt_token_ids": body["prompt_token_ids"], "seed": i,
             "output_token_ids": body["choices"][0]["token_ids"]} for i, body in enumerate(bodies)]


def make_probes(programs, texts, a):
    """Texts of the same prompts whose last tokens are a passcode that was stated once, long before."""
    rng = random.Random(a.seed)
    codes = ["".join(rng.choice("123456789") for _ in range(5)) for _ in range(a.probes)]
    pieces = [STATEMENT % code for code in codes] + [" " + code + "." for code in codes] + [QUESTION]
    # The engine's own tokenizer.
    bodies = programs.engine("tokens", [{"prompt": piece, "max_tokens": 1, "temperature": 0, "return_token_ids": True,
                                         "add_special_tokens": False} for piece in pieces], "compression_policy=none")
    ids = [body["prompt_token_ids"] for body in bodies]
    probes = []
    for i in range(a.probes):
        text = texts[i % len(texts)]["output_token_ids"]
        # What follows comes from other texts: this one must not be continued by copying itself.
        filler = [token for k in range(1, len(texts)) for token in texts[(i + k) % len(texts)]["output_token_ids"]]
        filler = (filler or text)[:a.filler]
        code = ids[a.probes + i][:-1]  # without the full stop
        probes.append({"id": "probe-%d" % i, "prompt_token_ids": texts[i % len(texts)]["prompt_token_ids"],
                       "output_token_ids": text[:a.lead] + ids[i] + filler + ids[-1] + code,
                       "recall_tokens": len(code), "seed": i})
    return probes


def loops(tokens, a):
    """Whether some n-gram occurs a.repeats times or more."""
    counts = collections.Counter(tuple(tokens[i:i + a.ngram]) for i in range(len(tokens) - a.ngram + 1))
    return bool(counts) and max(counts.values()) >= a.repeats


def is_right(text, answer):
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", boxed[-1] if boxed else text)
    try:
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(str(answer).replace(",", ""))
    except ValueError:
        return False


def summarize(rows, bodies, a):
    outputs = [body["choices"][0]["token_ids"] for body in bodies]
    contents = [body["choices"][0]["message"]["content"] for body in bodies]
    known = [(text, row["answer"]) for row, text in zip(rows, contents) if "answer" in row]
    return {"loops": sum(loops(output, a) for output in outputs),
            "length": sum(map(len, outputs)) / len(outputs),
            "cut": sum(body["choices"][0]["finish_reason"] == "length" for body in bodies),
            "right": sum(is_right(text, answer) for text, answer in known) if known else None,
            "compressions": sum(body["usage"]["compressions"] for body in bodies)}


def run_freely(programs, questions, setting, options, a):
    """Summaries by cell(); the budgets of a setting run in one job."""
    rows = [questions[i % len(questions)] for i in range(a.free_number)]
    budgets = [None] if setting == "full" else a.budgets
    requests = [ask(row, i, a, a.free_tokens, **({"kv_budget": budget} if budget else {}))
                for budget in budgets for i, row in enumerate(rows)]
    bodies = programs.engine("free", requests, options)
    return {cell(setting, budget): summarize(rows, bodies[k * len(rows):(k + 1) * len(rows)], a)
            for k, budget in enumerate(budgets)}


def percent(value):
    return "-" if value is None else "%.1f" % (100 * value)


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def free_cells(summary, a):
    right = [] if summary["right"] is None else ["%d/%d" % (summary["right"], a.free_number)]
    return ["%d/%d" % (summary["loops"], a.free_number), "%.0f" % summary["length"]] + right


def report(texts, probes, replayed, probed, free, a, seconds):
    some = next(iter(replayed.values()))
    full_recall = next(iter(probed.values()))["recall"]
    has_right = free[cell("full", None)]["right"] is not None
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    text = "%s, %s, %d threads, %.0f minutes. Model: %s, dtype %s. Blocks of %d.\n\n```\n%s\n```\n\n" % (
        datetime.date.today().isoformat(), cpu, a.threads, seconds / 60, os.path.basename(os.path.normpath(a.model)),
        a.dtype, a.block_size, shlex.join(["deploy/fidelity.py"] + sys.argv[1:]))
    text += ("%d texts (prompts of %.0f tokens on average, outputs of %d, temperature %g), %d tokens predicted; %d probes "
             "whose passcode was stated %d tokens before; %d free answers of up to %d tokens.\n\n" % (
                 len(texts), sum(len(t["prompt_token_ids"]) for t in texts) / len(texts), a.tokens, a.temperature,
                 some["all"]["positions"], len(probes), a.filler, a.free_number, a.free_tokens))
    text += ("agree: most probable next token the full cache's, %%, KL(full || setting) in nats and perplexity of the text: "
             "after the first compression of a text. prompt: share that the last compression still has, %%. recall: "
             "passcodes whose every digit is the most probable token (full cache: %d of %d), and the mean probability "
             "of a digit, as a perplexity (full cache: %.2f). loops: free answers in which %d tokens occur %d times or "
             "more.\n\n" % (full_recall["full_recalled"], full_recall["probes"],
                            full_recall["tokens"]["full_perplexity"], a.ngram, a.repeats))
    header = ["setting", "budget", "agree", "KL", "perplexity", "prompt", "recall", "digit perplexity", "loops", "length"]
    header += ["right"] if has_right else []
    rows = [["full cache", "-", "100", "0", "%.3f" % some["all"]["full_perplexity"], "100",
             "%d/%d" % (full_recall["full_recalled"], full_recall["probes"]),
             "%.2f" % full_recall["tokens"]["full_perplexity"], *free_cells(free[cell("full", None)], a)]]
    for budget in a.budgets:
        for setting, _ in SETTINGS:
            entry, recall = replayed[cell(setting, budget)], probed[cell(setting, budget)]["recall"]
            after = entry["after_compression"]
            if after["positions"] == 0:
                raise SystemExit("budget %d compresses nothing; give more --tokens" % budget)
            rows.append([setting, budget, percent(after["agreement"]), "%.4f" % after["kl"],
                         "%.3f (%.3f)" % (after["perplexity"], after["full_perplexity"]), percent(entry["prompt_kept"]),
                         "%d/%d" % (recall["recalled"], recall["probes"]), "%.2f" % recall["tokens"]["perplexity"],
                         *free_cells(free[cell(setting, budget)], a)])
    text += table(header, rows)
    text += "\nPerplexity in brackets: the full cache on the same tokens.\n\nKL by place in the output, in tokens:\n\n"
    for budget in a.budgets:
        buckets = [bucket["from"] for bucket in replayed[cell(SETTINGS[0][0], budget)]["buckets"]]
        rows = [[setting] + ["%.4f" % bucket["kl"] for bucket in replayed[cell(setting, budget)]["buckets"]]
                for setting, _ in SETTINGS]
        text += table(["budget %d" % budget] + ["from %d" % start for start in buckets], rows) + "\n"
    return text


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                epilog="The parts are described at the head of this file.")
    p.add_argument("--model", required=True, help="model folder")
    p.add_argument("--questions", default=str(ROOT / "tests/bench/gsm8k_32.jsonl"),
                   help="JSON Lines with \"question\" and, if they are to be marked, \"answer\" (a number)")
    p.add_argument("--number", type=int, default=8, help="texts to replay")
    p.add_argument("--tokens", type=int, default=512, help="output tokens of a text")
    p.add_argument("--probes", type=int, default=8, help="passcode probes")
    p.add_argument("--lead", type=int, default=32, help="output tokens before the passcode")
    p.add_argument("--filler", type=int, default=384, help="tokens between the passcode and the question")
    p.add_argument("--free_number", type=int, default=8, help="questions to answer freely")
    p.add_argument("--free_tokens", type=int, default=384, help="longest free answer")
    p.add_argument("--ngram", type=int, default=20, help="tokens of a repetition")
    p.add_argument("--repeats", type=int, default=4, help="times it occurs in a loop")
    p.add_argument("--budgets", type=lambda text: [int(part) for part in text.split(",")], default=[128, 256],
                   help="tokens, separated by commas, multiples of the block size")
    p.add_argument("--block_size", type=int, default=32, help="kvcache_block_size")
    p.add_argument("--temperature", type=float, default=0.6, help="of texts and free answers; 0 is greedy")
    p.add_argument("--seed", type=int, default=1, help="of sampling and passcodes")
    p.add_argument("--dtype", default="auto", help="of the engine")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    p.add_argument("--bin", default=str(ROOT / "build/cpu/bin"), help="folder of the programs")
    p.add_argument("--work", help="folder for jobs, outputs and reports; what an earlier run with the same arguments "
                   "left there is not made again. Default: a temporary folder, removed")
    p.add_argument("--out", help="file for the table; default: standard output")
    a = p.parse_args()
    for budget in a.budgets:
        if budget <= 0 or budget % a.block_size != 0:
            p.error("budget %d is no multiple of --block_size %d" % (budget, a.block_size))
    for name in ("number", "tokens", "probes", "filler", "free_number", "free_tokens", "ngram", "repeats", "threads"):
        if getattr(a, name) < 1:
            p.error("--%s must be 1 or more" % name)
    return a


def measure(a, folder):
    questions = read_questions(a.questions)
    programs = Programs(a, folder)
    parts = Parts(programs)
    sampling = [questions, a.temperature, a.seed]
    of_texts = [*sampling, a.number, a.tokens]
    of_probes = [of_texts, a.probes, a.lead, a.filler]
    of_free = [*sampling, a.free_number, a.free_tokens, a.ngram, a.repeats, a.budgets]
    texts = parts.make("texts", lambda: make_texts(programs, questions, a), of_texts)
    probes = parts.make("probes", lambda: make_probes(programs, texts, a), of_probes)
    replayed = parts.make("replay of texts", lambda: programs.fidelity("texts", texts), of_texts, a.budgets)
    probed = parts.make("replay of probes", lambda: programs.fidelity("probes", probes), of_probes, a.budgets)
    free = {}
    for setting, options in [("full", "compression_policy=none")] + SETTINGS:
        free.update(parts.make("free answers, " + setting,
                               lambda: run_freely(programs, questions, setting, options, a), of_free))
    return report(texts, probes, replayed, probed, free, a, parts.seconds)


def main():
    a = parse_arguments()
    if a.work:
        os.makedirs(a.work, exist_ok=True)
        text = measure(a, os.path.abspath(a.work))
    else:
        with tempfile.TemporaryDirectory(prefix="zipage-fidelity.") as folder:
            text = measure(a, folder)
    if a.out:
        pathlib.Path(a.out).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
