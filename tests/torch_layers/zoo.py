"""Public models from small configurations on made data: by name, a model and a step that returns its loss."""

# ruff: noqa: D103
from __future__ import annotations

import re
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

B = 2
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
ZOO = {}
NEEDS = {}
"""The packages that models come from."""
_LIBRARIES = []


def ids(n=16, vocab=100):
    """Tokens."""
    return torch.randint(0, vocab, (B, n))


def image(size=64, channels=3):
    """Images."""
    return torch.randn(B, channels, size, size)


def import_torchvision():
    """Torchvision, with models that need none of the operators that its builds for other PyTorchs lack.

    To be called before ``transformers``, ``timm`` or ``diffusers`` import it.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for _ in range(40):
        try:
            import torchvision
        except RuntimeError as error:
            name = re.search(r"torchvision::(\w+)", str(error))
            if name is None:
                raise
            for module in [module for module in sys.modules if module.startswith("torchvision")]:
                del sys.modules[module]
            library.define(f"{name[1]}(Tensor a, Tensor b, float c) -> Tensor")
        else:
            return torchvision
    raise ImportError("torchvision asks for too many operators")


def entry(needs=None):
    """Put a model into the zoo."""

    def put(make):
        ZOO[make.__name__], NEEDS[make.__name__] = make, needs
        return make

    return put


def cls(out):
    out = getattr(out, "logits", out)
    return F.cross_entropy(out, torch.arange(B) % out.shape[-1])


def hf(name, **kw):
    import transformers

    cfg = getattr(transformers, name + "Config")(**kw)
    return transformers, cfg


@entry("torchvision")
def resnet18():
    import torchvision

    return torchvision.models.resnet18(num_classes=10), lambda m: cls(m(image()))


@entry("torchvision")
def densenet():
    import torchvision

    return torchvision.models.DenseNet(8, (2, 2), 8, num_classes=10), lambda m: cls(m(image()))


@entry("torchvision")
def inception_aux():
    import torchvision

    m = torchvision.models.GoogLeNet(num_classes=10, aux_logits=True, init_weights=False)
    return m, lambda m: sum(cls(o) for o in m(image(96)))


@entry("torchvision")
def vit_timm():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10), lambda m: cls(m(image()))


@entry("torchvision")
def swin_timm():
    import timm

    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=56,
        embed_dim=24,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 3, 3),
        num_classes=10,
    ), lambda m: cls(m(image(56)))


@entry("torchvision")
def efficientnet_timm():
    import timm

    return timm.create_model("efficientnet_b0", num_classes=10), lambda m: cls(m(image()))


@entry("transformers")
def bert():
    t, c = hf("Bert", **TINY)
    return t.BertForMaskedLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def gpt2():
    t, c = hf("GPT2", n_embd=32, n_layer=3, n_head=4, vocab_size=100, n_positions=32)
    return t.GPT2LMHeadModel(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def llama():
    t, c = hf("Llama", **TINY, num_key_value_heads=2)
    return t.LlamaForCausalLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def llama_eager():
    t, c = hf("Llama", **TINY, num_key_value_heads=2)
    m = t.LlamaForCausalLM._from_config(c, attn_implementation="eager")
    return m, lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def llama_checkpointed():
    t, c = hf("Llama", **TINY, num_key_value_heads=2)
    m = t.LlamaForCausalLM(c)
    m.gradient_checkpointing_enable()
    return m, lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def llama_checkpointed_reentrant():
    t, c = hf("Llama", **TINY, num_key_value_heads=2)
    m = t.LlamaForCausalLM(c)
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    m.enable_input_require_grads()
    return m, lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def t5():
    t, c = hf("T5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100, decoder_start_token_id=0)
    return t.T5ForConditionalGeneration(c), lambda m: m(input_ids=ids(), labels=ids(8)).loss


@entry("transformers")
def mixtral():
    t, c = hf("Mixtral", **TINY, num_key_value_heads=2, num_local_experts=4)
    return t.MixtralForCausalLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def mamba():
    t, c = hf("Mamba", hidden_size=32, num_hidden_layers=2, vocab_size=100, state_size=8)
    return t.MambaForCausalLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def whisper():
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 100}
    sizes = {"d_model": 32, "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 20}
    t, c = hf("Whisper", **encoder, **decoder, **tokens, **sizes)
    return t.WhisperForConditionalGeneration(c), lambda m: m(input_features=torch.randn(B, 20, 100), labels=ids(8)).loss


@entry("transformers")
def clip():
    import transformers as t

    c = t.CLIPConfig(
        text_config=dict(**TINY, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0),
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=16,
    )
    return t.CLIPModel(c), lambda m: m(input_ids=ids(), pixel_values=image(32), return_loss=True).loss


@entry()
def detr_like():
    # DETR hands the weight of its queries, a leaf, to its transformer; here in the order of the paper's appendix.
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 32, 8, 8)
            self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
            self.query_pos = nn.Parameter(torch.rand(10, 32))
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            h = self.backbone(x).flatten(2).transpose(1, 2)
            q = self.query_pos.unsqueeze(0).expand(len(x), -1, -1)
            return self.head(self.transformer(h, q)).mean(1)

    return Net(), lambda m: cls(m(image()))


_TINY = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4}


@entry("diffusers")
def unet2d_diffusers():
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    m = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, **blocks, **_TINY)
    return m, lambda m: m(image(16), torch.tensor([3, 7])).sample.square().mean()


@entry("diffusers")
def sd_unet_diffusers():
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    shape = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16}
    m = UNet2DConditionModel(**shape, down_block_types=down, up_block_types=up, **_TINY)
    return m, lambda m: m(torch.randn(B, 4, 8, 8), torch.tensor([3, 7]), torch.randn(B, 5, 16)).sample.square().mean()


@entry()
def nn_transformer():
    m = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return m, lambda m: m(torch.randn(B, 9, 32), torch.randn(B, 7, 32)).square().mean()


@entry()
def lstm_tagger():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(100, 16)
            self.rnn = nn.LSTM(16, 16, 2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(32, 10)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(self.emb(x), [16, 12], batch_first=True)
            h, _ = self.rnn(packed)
            h, _ = nn.utils.rnn.pad_packed_sequence(h, batch_first=True)
            return self.out(h).mean(1)

    return Net(), lambda m: cls(m(ids()))


@entry()
def lstm_cells():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.cell, self.out = nn.Embedding(100, 16), nn.LSTMCell(16, 16), nn.Linear(16, 10)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(self.emb(x[:, t]), state)
            return self.out(state[0])

    return Net(), lambda m: cls(m(ids(6)))


@entry()
def gan():
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(True), nn.Linear(32, 64))
            self.d = nn.Sequential(
                nn.utils.spectral_norm(nn.Linear(64, 32)),
                nn.LeakyReLU(0.2),
                nn.utils.parametrizations.spectral_norm(nn.Linear(32, 1)),
            )

        def forward(self, z, x):
            fake = self.g(z)
            return self.d(fake), self.d(fake.detach()), self.d(x)

    def step(m):
        a, b, c = m(torch.randn(B, 8), torch.randn(B, 64))
        return F.softplus(-a).mean() + F.softplus(b).mean() + F.softplus(-c).mean()

    return Gan(), step


@entry()
def tied_and_shared():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(100, 32)
            self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
            self.blocks = nn.ModuleDict(
                {"a": self.block, "b": nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "c": self.block}
            )
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.emb.weight
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(32)) for _ in range(3)])

        def forward(self, x):
            h = self.emb(x)
            for scale, name in zip(self.scales, "abc", strict=False):
                h = h + self.blocks[name](h) * scale
            return self.head(h).mean(1)

    return Net(), lambda m: cls(m(ids()))


@entry("transformers")
def albert():
    t, c = hf("Albert", **TINY, embedding_size=16, num_hidden_groups=1)
    return t.AlbertForMaskedLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry("transformers")
def deberta():
    t, c = hf("DebertaV2", **TINY, relative_attention=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=32)
    return t.DebertaV2ForMaskedLM(c), lambda m: (lambda x: m(x, labels=x).loss)(ids())


@entry()
def lazy_mlp():
    m = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(10))
    return m, lambda m: cls(m(image(8)))


@entry("transformers")
def wav2vec2():
    convs = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    t, c = hf("Wav2Vec2", **TINY, **convs, **places, apply_spec_augment=False)
    return t.Wav2Vec2ForSequenceClassification(c), lambda m: m(torch.randn(B, 800), labels=torch.tensor([0, 1])).loss


@entry()
def perceiver_latents():
    # A resampler with learned latents that are handed to each layer (Flamingo's, Q-Former's way).
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.att, self.ff = (
                nn.LayerNorm(32),
                nn.MultiheadAttention(32, 4, batch_first=True),
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
            )

        def forward(self, latents, x):
            x = self.norm(x)
            latents = latents + self.att(latents, x, x)[0]
            return latents + self.ff(latents)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(16, 32)
            self.latents = nn.Parameter(torch.randn(1, 4, 32))
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.out = nn.Linear(32, 10)

        def forward(self, x):
            x = self.inp(x)
            h = self.latents.expand(len(x), -1, -1)
            for layer in self.layers:
                h = layer(h, x)
            return self.out(h.mean(1))

    return Net(), lambda m: cls(m(torch.randn(B, 9, 16)))


@entry()
def megatron_head():
    # A module that gets a leaf next to its input and uses it last.
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.act, self.norm = nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)

        def forward(self, h, weight):
            return F.linear(self.norm(self.act(self.dense(h))), weight)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.body, self.lm_head = nn.Embedding(100, 32), nn.Linear(32, 32), Head()
            self.emb2 = nn.Parameter(torch.randn(100, 32))

        def forward(self, x):
            return self.lm_head(self.body(self.emb(x)), self.emb2).mean(1)

    return Net(), lambda m: cls(m(ids()))
