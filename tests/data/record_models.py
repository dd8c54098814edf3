"""Record the results of tiny random models in Hugging Face transformers.

Run where torch 2.13 and transformers 5.23 or 5.24 are installed: `python
tests/data/record_models.py`.

A folder here is a model in its published form. Its `config.json` existed first and sets the size.
The weights are random. The functions below document the arrays of `run.npz` or `logits.npz`. Seeds
are chosen such that rounding does not change a text.
"""

import copy
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

HERE = Path(__file__).parent
LLAMAS = ["llama_tied", "llama_llama3", "llama_yarn", "llama_linear", "mistral", "qwen2", "qwen3"]
LLAMAS += ["mistral_window", "qwen2_window", "qwen3_window", "qwen3_moe", "olmo2"]
RECURRENT = ["mamba2", "mamba2_biased", "granite_hybrid", "granite_hybrid_rope"]
RECURRENT += ["granite_hybrid_experts", "granite_hybrid_experts_rope", "recurrent_gemma"]
RECURRENT += ["lfm2", "falcon_h1", "falcon_h1_norm", "qwen3_next"]
QWENS = ["qwen3_5", "qwen3_5_moe"]
OTHERS = ["llama4", "nemotron_h", "nemotron_h_latent", "deepseek_v32"]
OTHERS += ["nemotron_h_dense"]
GEMMAS = ["gemma4", "gemma4_experts", "gemma3n"]
DEEPSEEKS = ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves"]
# Seeds and gains for texts without repetition.
T5S = {"t5_gated": (48, 1.2), "t5_tied": (64, 1.5)}


def make(name: str, seed: int) -> torch.nn.Module:
    """Make the model of a folder's config, with the random weights that transformers gives it."""
    config = transformers.AutoConfig.from_pretrained(HERE / name)
    torch.manual_seed(seed)
    return getattr(transformers, config.architectures[0])(config).eval()


def write(name: str, net: torch.nn.Module) -> None:
    """Write weights in the published form."""
    net.save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


def record(name: str, file: str = "run.npz", **arrays) -> None:
    """Write arrays in 32 bits."""
    arrays = {key: np.asarray(array) for key, array in arrays.items()}
    narrow = {"i": np.int32, "f": np.float32, "b": bool}
    arrays = {key: array.astype(narrow[array.dtype.kind]) for key, array in arrays.items()}
    np.savez_compressed(HERE / name / file, **arrays)


# Every weight changes, norms, biases, gates and corrections too, so that each has an effect.


def llama(name: str, seed: int) -> torch.nn.Module:
    """Make a model whose attention is not nearly uniform."""
    net = make(name, seed)
    for parameter in net.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        else:
            parameter.mul_(4.0)
    return net


def recurrent(name: str, seed: int) -> torch.nn.Module:
    net = make(name, seed)
    for key, parameter in net.named_parameters():
        if parameter.ndim == 1 or key.endswith("gate_bias"):
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif "conv" in key and parameter.ndim == 3:
            parameter.copy_(0.5 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
        if name.startswith("qwen3_") and key.endswith("A_log"):  # or a state lasts for two tokens
            parameter.sub_(4.0)
    for key, values in net.named_buffers():
        if key.endswith("e_score_correction_bias"):
            values.copy_(0.2 * torch.randn_like(values))
    return net


def gemma(name: str, seed: int) -> torch.nn.Module:
    net = recurrent(name, seed)
    for key, values in [*net.named_parameters(), *net.named_buffers()]:
        if key.endswith("layer_scalar"):
            values.mul_(0.8 + 0.4 * torch.rand(1))
        elif key.endswith("q_norm.weight"):  # its attention has no scale; training compensates
            values.mul_(0.5)
    return net


def deepseek(name: str, seed: int) -> torch.nn.Module:
    net = make(name, seed)
    for key, values in [*net.named_parameters(), *net.named_buffers()]:
        if key.endswith("e_score_correction_bias"):
            values.copy_(0.2 * torch.randn_like(values))
        elif key.endswith("norm.weight"):
            values.add_(0.3 * torch.randn_like(values))
        elif values.ndim > 1:
            values.copy_(torch.randn_like(values) * values.shape[-1] ** -0.5)
    return net


def t5(name: str, seed: int, gain: float) -> torch.nn.Module:
    net = make(name, seed)
    if not net.config.tie_word_embeddings:
        net.lm_head.weight = torch.nn.Parameter(torch.empty_like(net.shared.weight))
    for key, parameter in net.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif "relative" in key:
            parameter.copy_(torch.randn_like(parameter))
        elif key == "shared.weight":  # small next to the layers' outputs, or texts repeat
            parameter.copy_(0.2 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * gain * parameter.shape[-1] ** -0.5)
        if key.endswith("q.weight"):  # its attention has no scale; training compensates for it
            parameter.mul_(net.config.d_kv**-0.5)
    return net


def extend_greedily(net: torch.nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens `[m, n]` with the greedy tokens after them."""
    for _ in range(count):
        logits = net(tokens, use_cache=False).logits[:, -1:]
        tokens = torch.cat([tokens, logits.argmax(-1)], dim=1)
    return tokens


def record_llamas() -> None:
    """Record `tokens`, and logits after every ninth."""
    for seed, name in enumerate(LLAMAS):
        net = llama(name, seed)
        tokens = torch.randint(0, 96, (1, 100))
        logits = net(tokens).logits[0]
        write(name, net)
        record(name, "logits.npz", tokens=tokens[0], logits=logits[::9])


def record_gemma3(prompt: int = 60) -> None:
    """Record `tokens` (a prompt), the `greedy` tokens after it, and some `logits`.

    They are those of every ninth token of the prompt, and of the token before each greedy one.
    """
    net = llama("gemma3", 51)
    tokens = extend_greedily(net, torch.randint(0, 96, (1, prompt)), 24)
    logits = net(tokens[:, :-1], use_cache=False).logits[0]
    logits = torch.cat([logits[:prompt:9], logits[prompt - 1 :]])
    write("gemma3", net)
    record("gemma3", tokens=tokens[0, :prompt], greedy=tokens[0, prompt:], logits=logits)


def record_texts(name: str, net: torch.nn.Module) -> None:
    """Record three prompts, each with its 32 greedy tokens, concatenated.

    `tokens` consists of lists of `lengths`; `outputs` marks the tokens with recorded logits: every
    fifth of a prompt, and all from its last token on.
    """
    prompts = [torch.randint(1, 96, (length,)) for length in (90, 7, 33)]
    texts = [extend_greedily(net, prompt[None], 32) for prompt in prompts]
    logits = np.concatenate([net(text, use_cache=False).logits[0] for text in texts])
    lengths = [len(text[0]) for text in texts]
    ats = [np.arange(length) for length in lengths]
    outputs = np.concatenate([(at % 5 == 0) | (at >= len(at) - 33) for at in ats])
    tokens = np.concatenate([text[0] for text in texts])
    record(name, tokens=tokens, lengths=lengths, outputs=outputs, logits=logits[outputs])


def record_recurrent() -> None:
    for seed, name in enumerate(RECURRENT):
        net = recurrent(name, seed)
        record_texts(name, net)
        write(name, net)


def grid_positions(before: int = 8, side: int = 4, after: int = 8) -> torch.Tensor:
    """Return positions `[3, n]` of text, a grid of patches and text, as in the Qwen models."""
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side)).T + before
    texts = [torch.arange(before), torch.arange(after) + before + side]
    first, last = (text[None].expand(3, -1) for text in texts)
    return torch.cat([first, grid, last], dim=1).long()


def record_rope_of_axes() -> None:
    """Record `x` `[n, 2, 16]` at `positions` `[n, 3]`, rotated in two layouts of 8 pairs.

    `alternating`: the pairs of the axes take turns, as in Qwen3.5, with 3, 3 and 2 pairs.
    `sections`: the pairs of an axis are neighbours, as in Qwen2-VL, with 2, 3 and 3 pairs.
    """
    positions, x = 7 * grid_positions(), torch.randn(1, 2, 32, 16)
    rope = dict(rope_type="default", rope_theta=100.0)
    sizes = dict(hidden_size=32, num_attention_heads=2, head_dim=16)

    def turn(rotary: torch.nn.Module) -> torch.Tensor:
        cos, sin = rotary(x, positions[:, None])
        return qwen2_vl.apply_rotary_pos_emb(x, x, cos, sin)[0][0].transpose(0, 1)

    three = rope | dict(mrope_section=[3, 3, 2], partial_rotary_factor=1.0)
    config = transformers.Qwen3_5TextConfig(**sizes, rope_parameters=three)
    alternating = turn(qwen3_5.Qwen3_5TextRotaryEmbedding(config))
    two = rope | dict(mrope_section=[2, 3, 3])
    config = transformers.Qwen2VLTextConfig(**sizes, rope_parameters=two)
    sections = turn(qwen2_vl.Qwen2VLRotaryEmbedding(config))
    arrays = dict(x=x[0].transpose(0, 1), positions=positions.T)
    record(".", "rope_of_axes.npz", **arrays, alternating=alternating, sections=sections)


def record_grid(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return embeddings, positions of three axes and logits of a text around a grid of patches."""
    positions = grid_positions()
    embed = net.get_input_embeddings()
    x = embed(torch.randint(1, 96, (positions.shape[1],)))
    x[8:24] = torch.randn_like(x[8:24]) * embed.weight.std()
    text = getattr(net.model, "language_model", net.model)
    out = text(inputs_embeds=x[None], position_ids=positions[:, None], use_cache=False)
    logits = net.lm_head(out.last_hidden_state)[0]
    return dict(grid_embeddings=x, grid_positions=positions.T, grid_logits=logits)


class Head(torch.nn.Module):
    """A head that predicts further tokens, as published: its layer is one of transformers."""

    def __init__(self, net: torch.nn.Module):
        super().__init__()
        config = copy.deepcopy(net.config.get_text_config())
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        text = type(getattr(net.model, "language_model", net.model))
        self.text = text(config)
        norm, width = type(self.text.norm), config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width), norm(width)
        self.fc = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return features `[1, n, d]`, from embeddings of tokens and features of those before."""
        both = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(both, dim=-1))
        return self.text(inputs_embeds=x, use_cache=False).last_hidden_state

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {key.removeprefix("text."): x for key, x in self.state_dict().items()}
        return {f"mtp.{key}": x for key, x in named.items() if "embed_tokens" not in key}


def train_head(net: torch.nn.Module, texts: torch.Tensor, steps: int = 200) -> Head:
    """Train a head on greedy texts `[n, length]`, so that some of its drafts are right."""
    head = Head(net)
    text = getattr(net.model, "language_model", net.model)
    hidden = text(texts, use_cache=False).last_hidden_state[:, :-2]
    embeddings = net.get_input_embeddings()(texts[:, 1:-1])
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(steps):
            logits = net.lm_head(head(embeddings, hidden))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward(inputs=list(head.parameters()))
            optimizer.step()
    print(f"loss of the head: {loss.item():.2f}")
    return head.eval()


def record_qwens() -> None:
    """Record texts, a grid of patches, and the `mtp_logits` `[39, V]` of a head.

    The head gets the tokens 1 to 39 of the first text and the features of the tokens before. It was
    trained on texts, some with `mtp_prompts` `[4, 6]`.
    """
    for seed, name in enumerate(QWENS):
        net = recurrent(name, seed)
        record_texts(name, net)
        file = np.load(HERE / name / "run.npz")
        tokens = torch.tensor(file["tokens"][None, :40]).long()
        texts = extend_greedily(net, torch.randint(1, 96, (48, 6)), 26)
        head = train_head(net, texts)
        text = getattr(net.model, "language_model", net.model)
        hidden = text(tokens, use_cache=False).last_hidden_state[:, :-1]
        features = head(net.get_input_embeddings()(tokens[:, 1:]), hidden)
        more = dict(mtp_logits=net.lm_head(features)[0], mtp_prompts=texts[:4, :6])
        more |= record_grid(net)
        record(name, **dict(file), **more)
        write(name, net)
        path = HERE / name / "model.safetensors"
        save_file(load_file(path) | head.tensors(), path, {"format": "pt"})


def record_others() -> None:
    for seed, name in enumerate(OTHERS):
        net = recurrent(name, 70 + seed)
        if hasattr(net, "set_experts_implementation"):
            net.set_experts_implementation("eager")
        record_texts(name, net)
        write(name, net)


def record_gemmas() -> None:
    """Record the texts of models, computed in float64."""
    for seed, name in enumerate(GEMMAS):
        net = gemma(name, seed + 70)
        write(name, net)
        net.set_experts_implementation("eager")  # others lack float64
        record_texts(name, net.double())


def pack_experts(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Replace the matrices of experts by random MXFP4 numbers; return these in packed form."""
    packed = {}
    for key, parameter in net.named_parameters():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(122, 125, shape, dtype=torch.uint8)
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return packed


def record_gpt_oss() -> None:
    """Record the texts of a model in bfloat16 and of one with experts in MXFP4."""
    for seed, name in enumerate(["gpt_oss", "gpt_oss_mxfp4"]):
        net = recurrent(name, seed)
        net.set_experts_implementation("eager")
        for parameter in net.parameters():  # rope frequencies, which are buffers, are not rounded
            parameter.copy_(parameter.bfloat16())
        packed = pack_experts(net) if name == "gpt_oss_mxfp4" else {}
        record_texts(name, net)
        tensors = {key: values.bfloat16() for key, values in net.named_parameters()}
        tensors = {key: x for key, x in tensors.items() if f"{key}_blocks" not in packed}
        save_file(tensors | packed, HERE / name / "model.safetensors")


def logits_after_shift(
    net: torch.nn.Module, tokens: torch.Tensor, prompt: int = 30, gap: slice = slice(4, 12)
) -> torch.Tensor:
    """The logits after a context shift, from the latents and rotated numbers of its cache."""
    cache = net(tokens[None, :prompt], use_cache=True).past_key_values
    forgotten = gap.stop - gap.start
    angles = -forgotten * net.model.rotary_emb.inv_freq
    neighbours = isinstance(net, transformers.DeepseekV2ForCausalLM)
    at = -1 if neighbours else -2  # pairs of neighbours, or halves
    for layer in cache.layers:
        before, after = layer.values[:, :, : gap.start], layer.values[:, :, gap.stop :]
        a, b = after.unflatten(-1, (-1, 2) if at == -1 else (2, -1)).unbind(at)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        layer.values = torch.cat([before, torch.stack(turned, at).flatten(-2)], dim=2)
        layer.keys = torch.cat([layer.keys[:, :, : gap.start], layer.keys[:, :, gap.stop :]], dim=2)
    positions = torch.arange(prompt, len(tokens)) - forgotten
    rest = tokens[None, prompt:]
    return net(rest, past_key_values=cache, position_ids=positions[None]).logits[0]


def record_deepseeks() -> None:
    """Record `tokens`, the `logits` after each, and those of the later ones after a shift.

    Computed in float64, except the operations that transformers always computes in float32.
    """
    for seed, name in enumerate(DEEPSEEKS):
        net = deepseek(name, seed + 10)
        write(name, net)
        net.set_experts_implementation("eager")  # others lack float64
        net.double()
        tokens = torch.randint(1, net.config.vocab_size, (48,))
        logits = net(tokens[None], use_cache=False).logits[0]
        record(name, tokens=tokens, logits=logits, shifted=logits_after_shift(net, tokens))


def record_t5s() -> None:
    """Record two `sources`, concatenated, and the `greedy` text for each, `[2, 25]`.

    The start token comes first. `logits`, `[2, 25, 96]`, are computed in 64 bits. For the first
    source also the best of 3 beams, `beam` `[9]`, with its `score`, a sum of log-probabilities.
    """
    for name, (seed, gain) in T5S.items():
        net = t5(name, seed, gain)
        sources = [torch.randint(1, 96, (length,)) for length in (37, 11)]
        more = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        texts, logits = [], []
        for source in sources:
            text = net.float().generate(source[None], max_new_tokens=24, **more)[0]
            rows = net.double()(input_ids=source[None], decoder_input_ids=text[None]).logits[0]
            assert (rows[:-1].argmax(-1) == text[1:]).all()
            texts.append(text)
            logits.append(rows)
        more |= dict(max_new_tokens=8, num_beams=3, length_penalty=0.0)
        beam = net.float().generate(sources[0][None], **more)[0]
        rows = net(input_ids=sources[0][None], decoder_input_ids=beam[None]).logits[0]
        shares = rows[:-1].log_softmax(-1)[torch.arange(8), beam[1:]]
        write(name, net.float())
        found = dict(greedy=torch.stack(texts), logits=torch.stack(logits), beam=beam)
        arrays = dict(sources=torch.cat(sources), lengths=[37, 11], score=float(shares.sum()))
        record(name, **arrays, **found)


if __name__ == "__main__":
    with torch.no_grad():
        record_llamas()
        record_gemma3()
        record_recurrent()
        record_qwens()
        record_rope_of_axes()
        record_others()
        record_gemmas()
        record_gpt_oss()
        record_deepseeks()
        record_t5s()
