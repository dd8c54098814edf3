"""Record what Hugging Face transformers computes with tiny random models of T5.

Run where torch and transformers are installed: `python tests/data/make_t5.py`. It writes to the
folder of each variant: two sources, one list after the other (`sources`, `lengths`); for each the
text that is generated greedily, `greedy` `[2, 25]`, the start token first, with the `logits`
`[2, 25, 96]` of all its tokens, computed in 64 bits; and for the first the best of 3 beams, `beam`
`[9]`, the start token first, with its `score`, the sum of log-probabilities.
"""

import recording
import torch

VOCABULARY, LENGTHS, GREEDY, BEAM = 96, (37, 11), 24, 8
# Seeds and gains of which no text repeats itself, nor is decided by rounding.
VARIANTS = {"t5_gated": (48, 1.2), "t5_tied": (64, 1.5)}


def make(name: str, seed: int, gain: float) -> torch.nn.Module:
    """Make a model whose every weight is random, norms and biases too."""
    net = recording.make(name, seed)
    if not net.config.tie_word_embeddings:
        net.lm_head.weight = torch.nn.Parameter(torch.empty_like(net.shared.weight))
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "relative" in key:
                parameter.copy_(torch.randn_like(parameter))
            elif key == "shared.weight":  # small beside what layers add, or a text repeats itself
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * gain * parameter.shape[-1] ** -0.5)
            if key.endswith("q.weight"):  # its attention has no scale, which training makes up for
                parameter.mul_(net.config.d_kv**-0.5)
    return net


def main() -> None:
    """Write all variants."""
    for name, (seed, gain) in VARIANTS.items():
        net = make(name, seed, gain)
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
            more |= dict(max_new_tokens=BEAM, num_beams=3, length_penalty=0.0)
            beam = net.float().generate(sources[0][None], **more)[0]
            rows = net(input_ids=sources[0][None], decoder_input_ids=beam[None]).logits[0]
            shares = rows[:-1].log_softmax(-1)[torch.arange(BEAM), beam[1:]]
        recording.write(name, net.float())
        recording.record(
            name,
            sources=torch.cat(sources),
            lengths=LENGTHS,
            greedy=torch.stack(texts),
            logits=torch.stack(logits),
            beam=beam,
            score=float(shares.sum()),
        )


if __name__ == "__main__":
    main()
