#!/usr/bin/env python3
"""Output tokens per second with and without KV compression, in one pool, in one run.

    python tests/bench/compression_bench.py --model DIR

Both engines get the same job and a pool of blocks for --pool_sequences sequences of full length. Every
request has a prompt of its own of --prompt random tokens and gets --times budgets of output (--budget
tokens), so that the full cache holds few sequences at once and compression many. The two take turns
--rounds times; loading is not timed. Printed are the best of each, their ratio, and the share of the
workers' time that compressing took; the exit status is 1 if the ratio is below --least_ratio or the share
above --most_share. Needs Python 3 and the built programs, nothing else.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def ceil_divide(a, b):
    return (a + b - 1) // b


class Engine:
    """A serving engine in a directory of its own."""

    def __init__(self, a, policy):
        self.a = a
        self.folder = tempfile.TemporaryDirectory(prefix="zipage-bench.")
        self.run_dir = os.path.join(self.folder.name, "run")
        self.log = open(os.path.join(self.folder.name, "log"), "w+", encoding="utf-8")
        length = a.prompt + a.times * a.budget
        blocks = a.pool_sequences * ceil_divide(length, a.block_size)
        self.process = subprocess.Popen(
            [a.bin + "/zipage-launch", "--model", a.model, "--device", "cpu", "--dtype", a.dtype, "--cpu_threads",
             str(a.threads), "--kvcache_block_size", str(a.block_size), "--num_kvcache_blocks", str(blocks),
             "--max_num_seqs", str(a.requests), "--max_model_len", str(length), "--no_enable_prefix_cache",
             "--compression_policy", policy, "--max_cache_blocks_per_seq", str(a.budget // a.block_size),
             "--run_dir", self.run_dir], stdout=self.log, stderr=subprocess.STDOUT)
        while not self.ready():
            if self.process.poll() is not None:
                self.log.seek(0)
                raise SystemExit("zipage-launch ended:\n" + self.log.read())
            time.sleep(0.2)

    def command(self, program, *flags):
        return subprocess.run([self.a.bin + "/" + program, "--engine", self.run_dir, *flags], capture_output=True,
                              text=True)

    def ready(self):
        status = self.command("zipage-status", "--json")
        return status.returncode == 0 and json.loads(status.stdout)["ready"]

    def run(self, job):
        """The engine's status after the job, and the response bodies."""
        out = os.path.join(self.folder.name, "out.jsonl")
        done = self.command("zipage-submit", "--job", job, "--output", out, "--overwrite", "--quiet")
        if done.returncode != 0:
            raise SystemExit("zipage-submit ended with status %d:\n%s" % (done.returncode, done.stderr))
        with open(out, encoding="utf-8") as f:
            bodies = [json.loads(line)["response"]["body"] for line in f]
        return json.loads(self.command("zipage-status", "--json").stdout), bodies

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()


def write_job(path, a):
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as f:
        for i in range(a.requests):
            # Low ids are ordinary tokens in every vocabulary.
            prompt = [rng.randrange(100, 5000) for _ in range(a.prompt)]
            f.write(json.dumps({"id": str(i), "prompt_token_ids": prompt, "max_tokens": a.times * a.budget,
                                "ignore_eos": True, "temperature": 1.0, "seed": i}) + "\n")


def measure(policy, job, a):
    """Tokens per second and the share of the workers' time spent compressing."""
    engine = Engine(a, policy)
    status, bodies = engine.run(job)
    engine.stop()
    wanted = a.times * a.budget
    tokens = [body["usage"]["completion_tokens"] for body in bodies]
    compressions = [body["usage"]["compressions"] for body in bodies]
    if tokens != [wanted] * a.requests:
        raise SystemExit("answers of %d to %d tokens, expected %d each" % (min(tokens), max(tokens), wanted))
    if policy != "none" and min(compressions) == 0:
        raise SystemExit("a request was never compressed")
    seconds = status["jobs"][-1]["seconds"]
    share = status["compression_seconds"] / status["device_seconds"]
    print("%-14s %7d tokens in %6.1f s: %8.2f tokens/s; at most %d at once, %d compressions (%.2f %% of the workers' "
          "time), %d preemptions" % (policy, sum(tokens), seconds, sum(tokens) / seconds, status["peak_running"],
                                     sum(compressions), 100 * share, status["num_preemptions"]), flush=True)
    return sum(tokens) / seconds, share


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", required=True)
    p.add_argument("--policy", default="auto", help="compression_policy against none")
    p.add_argument("--requests", type=int, default=24)
    p.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    p.add_argument("--budget", type=int, default=128, help="tokens, a multiple of the block size")
    p.add_argument("--times", type=int, default=8, help="output length in budgets")
    p.add_argument("--pool_sequences", type=int, default=4, help="sequences of full length that the pool holds")
    p.add_argument("--block_size", type=int, default=32)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--least_ratio", type=float, default=2.0)
    p.add_argument("--most_share", type=float, default=0.05)
    p.add_argument("--bin", default=str(ROOT / "build/cpu/bin"))
    a = p.parse_args()
    if a.budget < a.block_size or a.budget % a.block_size != 0:
        p.error("--budget %d is no multiple of --block_size %d" % (a.budget, a.block_size))
    best, shares = {}, []
    with tempfile.TemporaryDirectory(prefix="zipage-bench.") as folder:
        job = os.path.join(folder, "job.jsonl")
        write_job(job, a)
        for _ in range(a.rounds):
            for policy in (a.policy, "none"):
                speed, share = measure(policy, job, a)
                best[policy] = max(best.get(policy, 0), speed)
                shares += [share] if policy != "none" else []
    ratio, share = best[a.policy] / best["none"], min(shares)
    print("ratio %.2f (at least %.2f), compressing %.2f %% of the workers' time (at most %.2f %%)" % (
        ratio, a.least_ratio, 100 * share, 100 * a.most_share))
    raise SystemExit(0 if ratio >= a.least_ratio and share <= a.most_share else 1)


main()
