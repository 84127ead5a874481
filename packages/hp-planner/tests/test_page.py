"""The plan as one HTML page."""

from html.parser import HTMLParser

import pytest
from planner_models import model

from hp_planner import Workload, plan
from hp_planner.page import html_page

VOID = {"meta", "br", "link", "img", "input"}


class Reader(HTMLParser):
    """Checks that tags are balanced, and keeps the text and every attribute."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data.strip())


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


MESH = {"dp_shard": 2, "ep": 2, "cp": 2, "tp": 2}
WORK = Workload(2, 8, 4, experts_per_token=2)


def test_the_page_is_well_formed_and_loads_nothing():
    reader = read(html_page(plan(model("qwen3_moe"), MESH), WORK))
    names = {name for name, _ in reader.attributes}
    assert not names & {"src", "href", "onclick"}
    assert "://" not in html_page(plan(model("qwen3_moe"), MESH), WORK)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "gpt2"])
def test_every_parameter_and_boundary_is_on_it_with_layers_drawn_once(family):
    made = plan(model(family), {"dp_shard": 2} if family == "gpt2" else {"tp": 2})
    reader = read(html_page(made))
    marks = [value for name, value in reader.attributes if name == "class"]
    kinds = {(len(s.shape), s.role, s.name.split(".")[-2]) for s in made.parameters}
    assert sum(m == "parameter" for m in marks) >= len(kinds)
    for spec in made.parameters:
        owner, _, leaf = spec.name.rpartition(".")
        segment = owner.rpartition(".")[2]
        joined = f"{segment}.{leaf}"
        assert joined in reader.words or leaf in reader.words, spec.name
    assert sum(word == "attention" for word in reader.words) <= 1
    if family != "gpt2":
        assert "layers[0..1]" in reader.words


def test_placements_gradients_and_moves_are_told():
    reader = read(html_page(plan(model("qwen3_moe"), MESH), WORK))
    titles = {value for name, value in reader.attributes if name == "title"}
    assert "tp: Sec(1,[32,32])" in titles
    assert "ep: R, gradient P(avg)" in titles
    assert "forward: reduce-scatter" in reader.words
    assert "opaque: expert parallel" in reader.words


def test_what_holds_for_some_layers_only_says_for_which():
    made = plan(model("qwen3", num_hidden_layers=4), {"tp": 2})
    assert "in model.layers.{1..3}" in read(html_page(made)).words
    dense_first = plan(model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0]), {"tp": 2})
    words = read(html_page(dense_first)).words
    assert "in model.layers.0.mlp.down_proj" in " ".join(words) or "mlp" in words


def test_names_are_escaped():
    made = plan(model("llama"), {"tp": 2}, overrides={"lm_head": "none"})
    from attrs import evolve

    page = html_page(evolve(made, model="<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
