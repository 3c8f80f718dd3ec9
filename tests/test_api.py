"""docs/api.md lists what the package offers, with the arguments that the code has."""

import inspect
import re

from testing import ROOT

import maelm_jax
from maelm_jax import config
from maelm_jax.encoders import opened
from maelm_jax.finetuning import classifier

PAGE = (ROOT / "docs" / "api.md").read_text()
CALLS = re.findall(r"^\| `([\w.]+)(\(.*?\))` \|", PAGE, re.MULTILINE)
CLASSES = {"Encoder": opened.OpenedModel, "Classifier": classifier.Classifier}
TUPLES = {"Candidate": opened.Candidate, "Prediction": classifier.Prediction}


def arguments(function) -> str:
    """The arguments without their types."""
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values() if one.name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_the_page_names_every_public_function():
    named = [name for name, _ in CALLS if "." not in name]
    assert {*named, "__version__"} == set(maelm_jax.__all__) and "`maelm_jax.__version__`" in PAGE


def test_the_calls_of_the_page_have_the_arguments_of_the_code():
    for name, listed in CALLS:
        owner, _, method = name.rpartition(".")
        assert arguments(getattr(CLASSES[owner] if owner else maelm_jax, method)) == listed, name
    for name, cls in TUPLES.items():
        assert f"`{name}({', '.join(cls._fields)})`" in PAGE


def test_errors_are_those_that_the_page_names():
    assert issubclass(config.ConfigError, ValueError) and issubclass(config.RunError, RuntimeError)
