"""Adds to every golden file what the reference computes in bfloat16, and with its head tied where it isn't.

For developers; the tests read its output. Made with torch 2.13 and transformers 5.24, in an environment of their own:

    python tests/golden/add_variants.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

HERE = Path(__file__).parent


def add(directory: Path) -> None:
    with np.load(directory / "golden.npz") as stored:
        arrays = dict(stored)
    inputs = {"input_ids": torch.tensor(arrays["tokens"][None], dtype=torch.long)}
    kind = AutoModelForCausalLM
    if "inputs" in arrays:
        inputs = {"input_ids": torch.tensor(arrays["inputs"][None]).long(), "decoder_input_ids": inputs["input_ids"]}
        kind = AutoModelForSeq2SeqLM
    with torch.no_grad():
        exact = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")(**inputs).logits[0]
        np.testing.assert_allclose(exact.numpy(), arrays["logits"], atol=1e-4)
        model = kind.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")
        arrays["bfloat16_logits"] = model(**inputs).logits[0].float().numpy()
        config = AutoConfig.from_pretrained(directory, attn_implementation="eager")
        if "inputs" not in arrays and not config.tie_word_embeddings:
            config.tie_word_embeddings = True
            model = kind.from_pretrained(directory, config=config, dtype=torch.float32).eval()
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
            arrays["tied_logits"] = model(**inputs).logits[0].numpy()
    np.savez_compressed(directory / "golden.npz", **arrays)
    loss = float(np.sqrt(np.mean((arrays["bfloat16_logits"] - arrays["logits"]) ** 2)))
    print(directory.name, (directory / "golden.npz").stat().st_size, "bytes", loss)


if __name__ == "__main__":
    for path in sorted(HERE.glob("**/config.json")):
        if path.parent.name != "llama_bfloat16":
            add(path.parent)
