"""What users may rely on."""

import hp_integration


def test_the_public_names_are_these() -> None:
    assert hp_integration.__all__ == [
        "InputError",
        "Options",
        "Result",
        "World",
        "process_group",
        "run",
        "vocabulary_cross_entropy",
    ]
    assert all(getattr(hp_integration, name) is not None for name in hp_integration.__all__)
