import pytest
import torch
import transformers
from packaging.version import Version
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimum_memopt.engines.compile.capture import backend
from optimum_memopt.engines.compile.options import PLAIN
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import kernels

ROWS, LENGTH = 2, 192
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}


def roberta(attention: str = "sdpa", dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.RobertaConfig(**SIZES, attention_probs_dropout_prob=dropout, attn_implementation=attention)
    return transformers.RobertaForMaskedLM(config).cuda().train()


def header(model: torch.nn.Module, dtype: torch.dtype = torch.float32, compiler: str = "aot_eager") -> str:
    """Returns the first line above the table, after a step with padding."""
    ids = torch.randint(5, 60, (ROWS, LENGTH), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    engine = CompileEngine(None, compiler, dynamic=False, loss=PLAIN)
    engine.attach(model)
    try:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        torch.cuda.synchronize()
        return engine.plans().header[0]
    finally:
        engine.detach()


@pytest.mark.parametrize(
    "model, dtype, kernel",
    [
        (roberta, torch.float32, "memory-efficient"),
        (lambda: roberta(dropout=0.1), torch.bfloat16, "memory-efficient"),
        (lambda: roberta("eager"), torch.float32, "eager"),
    ],
    ids=["fp32", "bf16 with dropout", "eager"],
)
def test_the_header_names_the_attention(model, dtype, kernel):
    assert header(model(), dtype).endswith(f", attention: {kernel}")


def test_the_header_names_torchs_own_composition():
    with sdpa_kernel(SDPBackend.MATH):
        assert header(roberta()).endswith(", attention: math")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_cudnn_is_avoided_where_its_backward_may_give_nan(compiler, capsys):
    """The engine avoids cuDNN attention, which on the stand-in would end the process."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("cuDNN's attention is avoided from torch 2.11 on")
    if torch.cuda.get_device_capability() != (9, 0) or torch.backends.cudnn.version() >= 92600:
        pytest.skip("cuDNN is right here")
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert header(roberta(), torch.bfloat16, compiler).endswith("attention: memory-efficient")
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
    assert "whose backward may give NaN" in capsys.readouterr().err


class SharedModulation(torch.nn.Module):
    """https://github.com/pytorch/pytorch/issues/193061: two norms whose scales are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(1, 4, 256))
        self.config = None

    def forward(self, x: torch.Tensor) -> transformers.modeling_outputs.CausalLMOutput:
        for scale, shift in zip(*[iter(self.table.chunk(4, dim=1))] * 2, strict=True):
            x = torch.nn.functional.layer_norm(x, (256,)) * (1 + scale) + shift
        return transformers.modeling_outputs.CausalLMOutput(loss=x.square().mean())


@inductor_config.patch(force_disable_caches=True)
def test_kernels_with_wrong_gradients_are_not_written():
    """Only the engine's graphs are generated without these kernels. Caches are disabled because inductor generates no
    code on a cache hit."""
    patches = kernels.inductor_patches()
    if not patches:
        pytest.skip("this inductor is right")
    (name,) = patches
    before = inductor_config.get_config_copy()
    assert before[name]
    # Smaller tensors fit into the GPU's cache, and inductor does not merge their reductions.
    x = torch.randn(32, 1024, 256, device="cuda")
    model = SharedModulation().cuda().train()
    engine = CompileEngine(None, "inductor", dynamic=False)
    engine.attach(model)
    torch._inductor.metrics.reset()
    model(x).loss.backward()
    ours = torch._inductor.metrics.codegen_mix_order_reduction
    engine.detach()
    assert inductor_config.get_config_copy() == before
    torch.compile(model)(x).loss.backward()
    assert ours == 0 < torch._inductor.metrics.codegen_mix_order_reduction


def test_triton_without_a_compiler_is_found_before_the_first_step(monkeypatch):
    assert backend.missing_for("cuda") == ("", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert backend.missing_for("cuda")[0] == "there is no C compiler, which Triton needs"
    assert backend.default_compiler("cuda")[0] == "aot_eager"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert backend.missing_for("cuda")[0] == "there is no C compiler, which Triton needs"


def test_lengths_that_cudnn_gets_right_have_a_graph_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(kernels, "_CUDNN_SINCE_TORCH", Version("2.9"))
    monkeypatch.setattr(kernels, "_CUDNN_GPU", torch.cuda.get_device_capability())
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = []

    def compiler(module, inputs):
        found.append(bool(kernels.cudnn_attention_warning(module.graph)))
        return lambda *given: (given[-1],)

    def attend(query, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    compiled = torch.compile(attend, backend=compiler, dynamic=True)
    try:
        for length in (256, 320, 384, 448, 200):
            query = torch.empty(1, 2, length, 64, dtype=torch.bfloat16, device="cuda")
            compiled(query, torch.empty(1, 1, length, length, dtype=torch.bfloat16, device="cuda"))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
    assert found == [False, True]
