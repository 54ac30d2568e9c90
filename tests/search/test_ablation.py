from __future__ import annotations

from dataclasses import replace

import pytest
from tables import decided, in_turn, row

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Fp32Rule, Policy, Reason, amp_recipe
from amptune.search.table.ablation import ablated, variants_of
from amptune.search.table.effects import GPU

STEM, HEAD = Fp32Rule(path="stem"), Fp32Rule(path="head")
TWO_RULES = replace(amp_recipe("fp16", memory_format="channels_last"), fp32_math="tf32", fp32_modules=(STEM, HEAD))
NEEDED = Fp32Rule(path="head", reason=Reason(risk=8.0))


@pytest.mark.parametrize(
    ("policy", "variants"),
    [
        (
            TWO_RULES,
            {
                "autocast": Policy(memory_format="channels_last", fp32_math="tf32"),
                "fp32_math": replace(TWO_RULES, fp32_math="stock"),
                "fp32_modules: stem + head": replace(TWO_RULES, fp32_modules=(), fp32_math="stock"),
                "memory_format": replace(TWO_RULES, memory_format="contiguous"),
            },
        ),
        (STOCK, {}),
        # A rule that the numerics need stays.
        (
            replace(amp_recipe("bf16"), fp32_modules=(STEM, NEEDED)),
            {"autocast": STOCK, "fp32_modules: stem": replace(amp_recipe("bf16"), fp32_modules=(NEEDED,))},
        ),
        # Half weights take what belongs to them along.
        (
            Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, cudnn_benchmark=True),
            {
                "weights": Policy(cudnn_benchmark=True),
                "cudnn_benchmark": Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True),
            },
        ),
    ],
)
def test_each_departure_from_stock_has_a_variant_without_it(policy: Policy, variants: dict[str, Policy]) -> None:
    found = variants_of(policy)
    assert {one.setting: one.policy for one in found} == variants
    assert list(variants) == [one.setting for one in found]
    assert all(
        (one.value, one.reverted_to) == ("channels_last", "contiguous") for one in found if "format" in one.setting
    )


SPEEDY, FAILURE = amp_recipe("fp16", memory_format="channels_last"), Failure(kind="oom", message="")


def test_what_a_setting_buys_is_the_speed_with_it_over_the_speed_without() -> None:
    """A variant that was measured once tells what its one row tells; one that failed or was not measured, nothing."""
    many = in_turn({STOCK: [60.0] * 5, SPEEDY: [24.0] * 5, amp_recipe("fp16"): [44.0] * 5}, spread=0.02)
    once = [one for one in many if one.policy != amp_recipe("fp16") or one.launch == "comparison 0"]
    (well,), (little,) = (ablated(decided(rows, GPU), SPEEDY) for rows in (many, once))
    assert (well.variant.setting, well.variant.policy) == ("memory_format", amp_recipe("fp16"))
    assert well.buys.value == pytest.approx(44 / 24, rel=0.01)
    assert well.buys.value == pytest.approx(little.buys.value, rel=0.02)
    assert well.buys.half_width < little.buys.half_width
    failed = [*in_turn({STOCK: [60.0] * 3, SPEEDY: [24.0] * 3}), row(amp_recipe("fp16"), FAILURE)]
    assert ablated(decided(failed, GPU), SPEEDY) == ()
