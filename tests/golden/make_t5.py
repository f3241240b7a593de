"""Makes small random T5 checkpoints, and what the reference implementation computes with them.

For developers; the tests read its output. Made with torch 2.13 and transformers 5.24, in an environment of their own:

    python tests/golden/make_t5.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

HERE = Path(__file__).parent / "encoder_decoder"
SIZES = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    # So small that 20 tokens reach every kind of bucket.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
MODELS = {
    "t5": {"feed_forward_proj": "relu"},
    "t5_gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def make(name: str, seed: int) -> None:
    model = T5ForConditionalGeneration(T5Config(**SIZES, **MODELS[name])).eval()
    generator = torch.Generator().manual_seed(seed)
    if not MODELS[name].get("tie_word_embeddings", True):
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            wide = parameter.ndim == 2 and "relative" not in key
            parameter.copy_(noise * 0.8 / parameter.shape[1] ** 0.5 if wide else 1 + 0.3 * noise)
            if "shared" in key:
                parameter.copy_(noise)
    inputs = torch.randint(3, 64, (1, 21), generator=generator)
    tokens = torch.cat([torch.zeros(1, 1, dtype=torch.long), torch.randint(3, 64, (1, 23), generator=generator)], 1)
    with torch.no_grad():
        logits = model(input_ids=inputs, decoder_input_ids=tokens).logits[0].numpy()
    shutil.rmtree(HERE / name, ignore_errors=True)
    model.save_pretrained(HERE / name)
    arrays = {"inputs": inputs[0].numpy().astype(np.int32), "tokens": tokens[0].numpy().astype(np.int32)}
    np.savez_compressed(HERE / name / "golden.npz", logits=logits, **arrays)
    print(name, sum(file.stat().st_size for file in (HERE / name).iterdir()), "bytes", np.ptp(logits))


if __name__ == "__main__":
    for number, each in enumerate(MODELS):
        make(each, 200 + number)
