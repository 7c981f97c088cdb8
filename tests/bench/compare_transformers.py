#!/usr/bin/env python3
"""Output tokens per second of Zipage and of transformers, on this CPU, in one run.

    python tests/bench/compare_transformers.py --model DIR [--batch 8] [--dtype float32]

Both answer the same 32 GSM8K questions greedily. transformers generates in static batches of --batch
prompts in file order, left-padded; Zipage runs with --max_num_seqs of the same number. Against
transformers in bfloat16 Zipage runs with --dtype auto: bfloat16 where the CPU multiplies it, float32
elsewhere. Counted are the tokens up to and including the end of sequence; loading is not timed. The two take turns --rounds times;
printed are the best of each and their ratio. Needs torch and transformers in this Python.
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def messages(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


class Transformers:
    def __init__(self, a, questions):
        import torch
        import transformers

        torch.set_num_threads(a.threads)
        self.torch, self.a = torch, a
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
        self.tokenizer.padding_side = "left"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype)).eval()
        self.texts = [self.tokenizer.apply_chat_template(messages(q), tokenize=False, add_generation_prompt=True)
                      for q in questions]

    def run(self):
        """Output tokens of each question, and seconds."""
        eos = self.model.generation_config.eos_token_id
        eos = set(eos if isinstance(eos, list) else [eos])
        outputs, start = [], time.time()
        for i in range(0, len(self.texts), self.a.batch):
            batch = self.tokenizer(self.texts[i:i + self.a.batch], return_tensors="pt", padding=True,
                                   add_special_tokens=False)
            with self.torch.no_grad():
                rows = self.model.generate(**batch, max_new_tokens=self.a.max_tokens, do_sample=False,
                                           temperature=None, top_p=None, top_k=None, repetition_penalty=1.0)
            for row in rows[:, batch["input_ids"].shape[1]:].tolist():
                end = next((j + 1 for j, t in enumerate(row) if t in eos), len(row))
                outputs.append(row[:end])
        return outputs, time.time() - start


class Zipage:
    def __init__(self, a, questions, folder):
        self.a, self.folder = a, folder
        self.job = os.path.join(folder, "job.jsonl")
        with open(self.job, "w", encoding="utf-8") as f:
            for i, q in enumerate(questions):
                f.write(json.dumps({"id": str(i), "messages": messages(q), "temperature": 0, "repetition_penalty": 1,
                                    "max_tokens": a.max_tokens, "return_token_ids": True}) + "\n")
        self.run_dir = os.path.join(folder, "run")
        self.log = open(os.path.join(folder, "log"), "w+")
        # The prefix cache off: every round does the same work.
        self.engine = subprocess.Popen(
            [a.bin + "/zipage-launch", "--model", a.model, "--device", "cpu", "--dtype", a.dtype if a.dtype == "float32" else "auto",
             "--max_num_seqs", str(a.batch), "--cpu_threads", str(a.threads), "--no_enable_prefix_cache",
             "--kvcache_block_size", "32", "--run_dir", self.run_dir],
            stdout=self.log, stderr=subprocess.STDOUT)
        while not self.ready():
            if self.engine.poll() is not None:
                self.log.seek(0)
                raise SystemExit("zipage-launch ended:\n" + self.log.read())
            time.sleep(0.2)

    def ready(self):
        status = subprocess.run([self.a.bin + "/zipage-status", "--engine", self.run_dir, "--json"],
                                capture_output=True, text=True)
        return status.returncode == 0 and json.loads(status.stdout)["ready"]

    def run(self):
        out = os.path.join(self.folder, "out.jsonl")
        subprocess.run([self.a.bin + "/zipage-submit", "--engine", self.run_dir, "--job", self.job, "--output", out,
                        "--overwrite", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        status = json.loads(subprocess.run([self.a.bin + "/zipage-status", "--engine", self.run_dir, "--json"],
                                           capture_output=True, text=True, check=True).stdout)
        with open(out, encoding="utf-8") as f:
            rows = {int(r["custom_id"]): r["response"]["body"] for r in map(json.loads, f)}
        return [rows[i]["choices"][0]["token_ids"] for i in range(len(rows))], status["jobs"][-1]["seconds"]

    def stop(self):
        self.engine.terminate()
        self.engine.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", required=True)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--max_tokens", type=int, default=256)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--questions", default=str(ROOT / "tests/bench/gsm8k_32.jsonl"))
    p.add_argument("--bin", default=str(ROOT / "build/cpu/bin"))
    a = p.parse_args()
    with open(a.questions, encoding="utf-8") as f:
        questions = [json.loads(line)["question"] for line in f]
    best = {}
    peer = Transformers(a, questions)
    with tempfile.TemporaryDirectory(prefix="zipage-compare.") as folder:
        for round_ in range(a.rounds):
            # Started anew for each round: an idle engine leaves the peer all cores and memory.
            ours = Zipage(a, questions, tempfile.mkdtemp(dir=folder))
            for name, side in (("zipage", ours), ("transformers", peer)):
                outputs, seconds = side.run()
                tokens = sum(map(len, outputs))
                print("round %d  %-13s %6d tokens in %7.1f s: %7.2f tokens/s" % (
                    round_, name, tokens, seconds, tokens / seconds), flush=True)
                best[name] = max(best.get(name, 0), tokens / seconds)
                if name == "zipage":
                    ours.stop()
                    mine = outputs
            same = sum(x == y for x, y in zip(mine, outputs))
            print("round %d  %d of %d answers are the same, token for token" % (round_, same, len(outputs)), flush=True)
    print("%s, batch %d: zipage %.2f, transformers %.2f tokens/s, ratio %.2f" % (
        a.dtype, a.batch, best["zipage"], best["transformers"], best["zipage"] / best["transformers"]))


main()
