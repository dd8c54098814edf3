"""Record what Hugging Face transformers computes with tiny random models of T5.

Run where torch and transformers are installed: `python tests/data/make_t5.py`. It writes, for each
variant, a folder as models are published (config.json, model.safetensors) with `run.npz` beside it:
two sources, one list after the other (`sources`, `lengths`); for each the text that is generated
greedily, `greedy` `[2, 25]`, the start token first, with the `logits` `[2, 25, 96]` of all its
tokens, computed in 64 bits; and for the first the best of 3 beams, `beam` `[9]`, the start token
first, with its `score`, the sum of log-probabilities. transformers 5.23, torch 2.13.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY, LENGTHS, GREEDY, BEAM = 96, (37, 11), 24, 8
SIZES = dict(
    vocab_size=VOCABULARY,
    d_model=24,
    d_kv=8,
    d_ff=20,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=0,
    eos_token_id=None,
)
VARIANTS = {  # with seeds and gains of which no text repeats itself, nor is decided by rounding
    "t5_gated": (48, 1.2, dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "t5_tied": (64, 1.5, dict(feed_forward_proj="relu", tie_word_embeddings=True)),
}


def make(seed: int, gain: float, options: dict) -> T5ForConditionalGeneration:
    """Make a model whose every weight is random, norms and biases too."""
    torch.manual_seed(seed)
    net = T5ForConditionalGeneration(T5Config(**SIZES, **options)).eval()
    if not options["tie_word_embeddings"]:
        net.lm_head.weight = torch.nn.Parameter(torch.empty_like(net.shared.weight))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "relative" in name:
                parameter.copy_(torch.randn_like(parameter))
            elif name == "shared.weight":  # small beside what layers add, or a text repeats itself
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * gain * parameter.shape[-1] ** -0.5)
            if name.endswith("q.weight"):  # its attention has no scale, which training makes up for
                parameter.mul_(SIZES["d_kv"] ** -0.5)
    return net


def main() -> None:
    """Write all variants."""
    for name, (seed, gain, options) in VARIANTS.items():
        net = make(seed, gain, options)
        sources = [torch.randint(1, VOCABULARY, (length,)) for length in LENGTHS]
        more = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        texts, logits = [], []
        with torch.no_grad():
            for source in sources:
                text = net.float().generate(source[None], max_new_tokens=GREEDY, **more)[0]
                rows = net.double()(input_ids=source[None], decoder_input_ids=text[None]).logits[0]
                assert (rows[:-1].argmax(-1) == text[1:]).all()
                best = rows.topk(2).values
                print(name, text.tolist(), float((best[:, 0] - best[:, 1]).min()))
                texts.append(text)
                logits.append(rows)
            beam = net.float().generate(
                sources[0][None],
                max_new_tokens=BEAM,
                num_beams=3,
                length_penalty=0.0,
                **more,
            )[0]
            rows = net(input_ids=sources[0][None], decoder_input_ids=beam[None]).logits[0]
            shares = rows[:-1].log_softmax(-1)[torch.arange(BEAM), beam[1:]]
        folder = Path(__file__).parent / name
        net.float().save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            folder / "run.npz",
            sources=torch.cat(sources).numpy().astype(np.int32),
            lengths=np.array(LENGTHS),
            greedy=torch.stack(texts).numpy().astype(np.int32),
            logits=torch.stack(logits).float().numpy(),
            beam=beam.numpy().astype(np.int32),
            score=float(shares.sum()),
        )


if __name__ == "__main__":
    main()
