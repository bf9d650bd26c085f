"""What a request may say, and the one sentence of an error where it says something else."""

from __future__ import annotations

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import zoo
from clients import chat, clip, data_url, direct, picture, streamed, text, user
from PIL import Image
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from mmaccel import MmaccelError
from mmaccel.media import untrusted
from mmaccel.media.files import Chat, encode
from mmaccel.recipe import get_recipe

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel.programs.serve import app  # noqa: E402
from mmaccel.programs.serve.detokenizer import Detokenizer  # noqa: E402
from mmaccel.programs.serve.errors import Refused  # noqa: E402
from mmaccel.programs.serve.sampling import GumbelNoise, sampler  # noqa: E402
from mmaccel.programs.serve.schema import read  # noqa: E402


@pytest.fixture(scope="module")
def served(serve_module):
    return serve_module("mini-llava", "divprune", several=2, waiting=8)


def test_a_budget_of_one_request(served, things):
    """Another share, the bare model, and the recipe's own budget again."""
    for budget, named, changes in (
        ({"retain": 0.1}, "divprune", {"retain": 0.1}),
        (False, "none", {}),
        ({"retain": 7}, "divprune", {"retain": 7}),
        (None, "divprune", {}),
    ):
        expected = direct("mini-llava", things.prompt, named, **changes)
        found = chat(served, things.message, extra_body={"mmaccel": budget})
        assert (text(found), found.mmaccel["kv_bytes"]) == (expected.answer, expected.kv_bytes)
        assert found.mmaccel["visual_tokens_kept"] == expected.visual_tokens_kept


def test_a_budget_of_pixels(serve, things):
    """Recipes that make pictures smaller have their budget in the processor."""
    served = serve("mini-qwen-vl", "resize")
    for changes in ({}, {"retain": 0.5}):
        expected = direct("mini-qwen-vl", things.prompt, "resize", **changes)
        found = chat(served, things.message, extra_body={"mmaccel": changes or None})
        assert (found.usage.prompt_tokens, text(found)) == (expected.prompt_tokens, expected.answer)
    whole = chat(served, things.message, extra_body={"mmaccel": False})
    assert whole.usage.prompt_tokens > found.usage.prompt_tokens > 20


def body(**changes):
    return {"model": "mini-llava", "messages": [user("what is there ?")], **changes}


def content(*parts):
    return body(messages=[user(*parts, "what ?")])


BAD = {
    "no JSON": ("{", "no valid JSON"),
    "half a character": (b'{"model": "\xff"}', "no text in UTF-8"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "a long number": ('{"seed": ' + "9" * 5000 + "}", "a number is too long"),
    "no object": ("[]", "must be an object"),
    "no model": ({"messages": [user("?")]}, "model is missing"),
    "unknown field": (body(top_k=5), "top_k is not known here; leave it out"),
    "several choices": (body(n=2), "n must be 1 on this server; leave it out"),
    "no messages": (body(messages=[]), "messages: list should have at least 1 item"),
    "an unknown role": (body(messages=[{"role": "tool", "content": "x"}]), "messages.0.role: input should be"),
    "an answer at the end": (body(messages=[{"role": "assistant", "content": "x"}]), "end with one of the user"),
    "no content": (body(messages=[{"role": "user", "content": None}]), "messages.0.content is missing"),
    "an unknown part": (body(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "input_audio"),
    "no address": (content({"type": "image_url", "image_url": {}}), "image_url.url is missing"),
    "many pictures": (content(*[picture("data:,")] * 33), "33 pictures; at most 32"),
    "many clips": (content(*[clip("data:,")] * 9), "9 clips; at most 8"),
    "a cold text": (body(temperature=-1), "temperature: input should be greater than or equal to 0"),
    "no number": (body(temperature="warm"), "temperature: input should be a valid number"),
    "not a number": (json.dumps(body(temperature=float("nan"))), "temperature: input should be a finite number"),
    "no tokens": (body(max_tokens=0), "max_tokens: input should be greater"),
    "a long answer": (body(max_tokens=10**6), "at most 1024 tokens on this server, not 1000000"),
    "many stops": (body(stop=["a"] * 5), "stop has 5 items; at most 4"),
    "an empty stop": (body(stop=""), "stop.0: string should have at least 1 character"),
    "a large share": (body(mmaccel={"retain": 1.5}), "retain=1.5 is outside"),
    "no share": (body(mmaccel={"retain": "much"}), "retain"),
    "not a share": (json.dumps(body(mmaccel={"retain": float("nan")})), "retain"),
    "another option": (body(mmaccel={"retain": 0.1, "layer": 2}), "mmaccel takes the budget of this request"),
    "a recipe": (body(mmaccel="fastv"), "mmaccel takes the budget of this request"),
    "pixels in words": (body(messages=[user("<image>")]), "'<image>', which is a placeholder of pixels"),
    "no base 64": (content(picture("data:image/png;base64,$$$$")), "not valid base 64"),
    "no encoding": (content(picture("data:image/png,abc")), "must be in base 64"),
    "no picture": (content(picture("data:image/png;base64,AAAA")), "of another format than PNG"),
    "a path": (content(picture("/etc/passwd")), "address of a picture or clip must be"),
    "a file": (content(picture("file:///etc/passwd")), "start it with --allow-files FOLDER"),
    "a host": (content(picture("http://127.0.0.1:1/x.png")), "loads nothing from addresses"),
    "another scheme": (content(picture("ftp://example.com/x.png")), "address of a picture or clip must be"),
    "a clip to a model of pictures": (None, "takes no video"),
    "a broken clip": (content(clip("data:video/mp4;base64,AAAA")), "is not a readable clip"),
    "text for a clip": (content(clip("data:text/html;base64,AAAA")), "is not a readable clip"),
    "an endless prompt": (body(messages=[user("one two " * 5000)]), "this model takes 4096 in all"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_in_one_sentence(served, things, name):
    given, sentence = BAD[name]
    given = content(clip(data_url(things.mp4))) if given is None else given
    given = json.dumps(given) if isinstance(given, dict) else given
    found = served.http.post("/v1/chat/completions", content=given, headers={"content-type": "application/json"})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert re.search(re.escape(sentence), error["message"]), error["message"]
    assert "\n" not in error["message"] and "mmaccel-serve-" not in error["message"] and len(error["message"]) < 600


#: fields that clients send and that ask for nothing
NOTHING = {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "logit_bias": {},
    "store": True,
    "metadata": {"run": "7"},
    "user": "someone",
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "stream_options": {"include_usage": False, "include_obfuscation": False},
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "seed": 7,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "reasoning_effort": "low",
    "verbosity": "medium",
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "max_completion_tokens": 16,
    "stop": [],
}
#: fields that ask for what there is not
SOMETHING = {
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "logit_bias": {"5": 100},
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"},
    "web_search_options": {},
    "top_k": 5,
    "temprature": 0,
}
#: names of classes and of what pydantic calls its types
PRIVATE = re.compile(r"_[A-Z]|\b(Body|Literal|dict|list_type|instance of|model_type|literal)\b")


def test_fields_that_ask_for_nothing(served, things):
    """Alone and together, by the client of OpenAI and as null; the answer is the same."""
    expected = text(chat(served, things.message, temperature=0))
    together = {name: value for name, value in NOTHING.items() if name != "top_logprobs"}
    assert text(chat(served, things.message, temperature=0, **together, max_tokens=None)) == expected
    for name, value in NOTHING.items():
        for given in (value, None):
            read(json.dumps(body(**{name: given})).encode())
    for name in SOMETHING:
        read(json.dumps(body(**{name: None})).encode())
    assert text(chat(served, things.message, temperature=0, extra_body=dict.fromkeys(NOTHING))) == expected


@pytest.mark.parametrize("name", SOMETHING)
def test_fields_that_ask_for_what_there_is_not(served, name):
    found = served.http.post("/v1/chat/completions", json=body(**{name: SOMETHING[name]}))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(name) and "leave it out" in error["message"]
    assert not PRIVATE.search(error["message"]) and error["message"].count(". ") == 0


def test_messages_as_clients_send_them_back(served, things):
    """What the client of OpenAI made of an answer is a message of the next request."""
    first = chat(served, things.message, temperature=0)
    answer = first.choices[0].message.model_dump()
    assert answer["refusal"] is None and answer["tool_calls"] is None
    more = {"annotations": [], "tool_calls": [], "provider_specific_fields": None, "audio": None}
    question = user("and now ?") | {"name": "someone"}
    shown = things.message["content"][0]
    cached = shown | {"cache_control": {"type": "ephemeral"}, "uuid": "7"}
    plain = {"type": "image_url", "image_url": shown["image_url"]["url"]}
    detailed = {"type": "image_url", "image_url": shown["image_url"] | {"detail": "original", "format": "image/png"}}
    words = things.message["content"][1]
    answers = {
        text(chat(served, user(one, words["text"]), answer | more, question, temperature=0))
        for one in (shown, cached, plain, detailed)
    }
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([7], "messages.0 must be an object"),
        ({"role": "user"}, "messages: input should be a valid list"),
        ([{"role": "user"}], "messages.0.content is missing"),
        ([{"role": "user", "content": {}}], "messages.0.content: input should be a valid list"),
        ([{"role": "user", "content": ["?"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"text": "?"}]}], "messages.0.content.0.type is missing"),
        ([{"role": "user", "content": [{"type": 7}]}], "messages.0.content.0.type must be 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text is missing"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "messages.0.content.0.text: input"),
        ([{"role": "user", "content": [{"type": "text", "text": "?", "x": 1}]}], "messages.0.content.0.x is not known"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": 7}]}],
            "messages.0.content.0.image_url must be",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 7}}]}],
            "messages.0.content.0.image_url.url: input",
        ),
        (
            [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "fps": 2}}]}],
            "messages.0.content.0.video_url.fps is not known",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages.0.tool_calls must be"),
        ([{"role": "user", "content": "x", "audio": {"id": "a"}}], "messages.0.audio is not supported"),
    ],
)
def test_fields_are_named_as_they_were_sent(messages, where):
    with pytest.raises(Refused) as caught:
        read(json.dumps(body(messages=messages)).encode())
    assert str(caught.value).startswith(where) and not PRIVATE.search(str(caught.value))


def test_errors_are_those_of_the_client(served):
    with pytest.raises(
        openai.NotFoundError, match="There is no model 'mini' on this server; ask for 'mini-llava'"
    ) as caught:
        served.client.chat.completions.create(model="mini", messages=[user("?")])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="retain=7.5 is outside"):
        chat(served, user("?"), extra_body={"mmaccel": {"retain": 7.5}}, stream=True)


def test_what_a_recipe_without_a_budget_cannot(serve):
    with pytest.raises(openai.BadRequestError, match="drops nothing, so retain=0.1 has no meaning"):
        chat(serve("mini-llava", "kivi"), user("?"), extra_body={"mmaccel": {"retain": 0.1}})


def test_bombs(served, things, monkeypatch, tmp_path):
    """Small files of large pictures, one or many; the sizes of bodies and of what is in them."""

    def refusal(*parts, status=400):
        found = served.http.post("/v1/chat/completions", json=content(*parts))
        assert found.status_code == status, found.text
        return found.json()["error"]["message"]

    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    assert "81 megapixels; at most 40" in refusal(picture(data_url(tmp_path / "huge.png")))
    Image.new("1", (500, 500)).save(tmp_path / "large.png")
    large = picture(data_url(tmp_path / "large.png"))
    for where, limit, value, given, said, status in (
        (untrusted, "MEMORY", 1_400_000, [large] * 3, "or 1 MiB to decode; show less", 400),
        (untrusted, "SECONDS", 0.0, [large], "more than 0 seconds", 400),
        (untrusted, "UPLOAD", 50, [picture(data_url(things.png))], "too large", 400),
        (app, "BODY", 1000, [picture(data_url(things.png))], "at most 0 MiB are taken", 413),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, limit, value)
            assert said in refusal(*given, status=status)


def test_what_processors_do_not_take(serve, tmp_path):
    """Their own errors are of the request, and no fault of the server."""
    served = serve("mini-qwen-vl")
    Image.new("RGB", (2000, 2)).save(tmp_path / "line.png")
    found = served.http.post(
        "/v1/chat/completions",
        json={"model": "mini-qwen-vl", "messages": [user(picture(data_url(tmp_path / "line.png")), "?")]},
    )
    assert found.status_code == 400 and "at most 200 times the other" in found.json()["error"]["message"]


def test_other_doors(served):
    http = served.http
    assert http.get("/health").json() == {"status": "ok"}
    assert [one.id for one in served.client.models.list()] == ["mini-llava"]
    assert served.client.models.retrieve("mini-llava").mmaccel == {
        "recipe": "divprune",
        "retain": get_recipe("divprune").retain,
    }
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 404),
        ("GET", "/", 404),
    ):
        found = http.request(method, path)
        assert found.status_code == status and found.json()["error"]["message"]
    assert http.post("/v1/chat/completions", content=json.dumps(body())).status_code == 415
    plain = {"content-type": "text/plain"}
    assert http.post("/v1/chat/completions", content=json.dumps(body()), headers=plain).status_code == 415


def test_keys_and_names(serve):
    served = serve("mini-llava", key="secret", allowed=["box.example.com"])
    assert text(chat(served, user("?"), max_tokens=1)) is not None
    for given in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
        for path in ("/v1/models", "/metrics"):
            found = served.http.get(path, headers=given)
            assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
    assert served.http.get("/health").status_code == 200
    for name, status in (("evil.example.com", 403), ("box.example.com", 200), ("localhost:9", 200), ("[::1]:9", 200)):
        assert served.http.get("/health", headers={"host": name}).status_code == status, name


def test_system_prompts_and_places_of_pictures(served, things, monkeypatch):
    """What the model is given is what the template makes of the messages, in their order."""
    seen = []
    engine = served.scheduler.engines[0]
    for engine in served.scheduler.engines:
        monkeypatch.setattr(
            engine, "_chat", lambda request, stop, was=engine._chat: seen.append(was(request, stop)) or seen[-1]
        )
    shown = picture(data_url(things.png))
    messages = [
        {"role": "developer", "content": "be brief"},
        user("what is there ?"),
        {"role": "assistant", "content": "a circle", "refusal": None},
        user("and", shown, "here", shown, "?"),
    ]
    chat(served, *messages, max_tokens=1)
    words = {"type": "text"}
    assert [message["role"] for message in seen[0].messages] == ["system", "user", "assistant", "user"]
    assert seen[0].messages[0]["content"] == [words | {"text": "be brief"}]
    kinds = [part.get("text", part["type"]) for part in seen[0].messages[-1]["content"]]
    assert kinds == ["and", "image", "here", "image", "?"] and len(seen[0].pictures) == 2


def test_several_clips(serve, things):
    served = serve("mini-qwen-vl", "none")
    film, shown = clip(data_url(things.mp4)), picture(data_url(things.png))
    tokens = [
        chat(served, user(*parts, "what ?"), max_tokens=1).mmaccel["visual_tokens"]
        for parts in ([film], [shown], [film, shown, film])
    ]
    assert tokens[0] > tokens[1] > 0 and tokens[2] == 2 * tokens[0] + tokens[1]


MESSAGES = (
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    {"role": "user", "content": [{"type": "text", "text": "and now ?"}]},
)


def test_models_without_a_chat_template():
    """Turns by name, pictures before the words of theirs."""
    processor = copy.deepcopy(zoo.processor("llava"))
    processor.chat_template = processor.tokenizer.chat_template = None
    shown = Image.new("RGB", (56, 56))
    found = encode(processor, [Chat(MESSAGES, (shown,))])
    said = processor.tokenizer.decode(found["input_ids"][0]).replace(processor.image_token, "")
    expected = "be brief USER: \nlook ASSISTANT: yes USER: and now ? ASSISTANT:"
    assert processor.tokenizer(said)["input_ids"] == processor.tokenizer(expected)["input_ids"]


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 'a' + messages }}"])
def test_templates_that_do_not_take_the_messages(template):
    processor = copy.deepcopy(zoo.processor("llava"))
    processor.chat_template = template
    with pytest.raises(MmaccelError, match="template of this model does not take these messages: (roles|can only)"):
        encode(processor, [Chat(MESSAGES, (Image.new("RGB", (56, 56)),))])


def test_stop_sequences_and_length(served, things):
    whole = text(chat(served, things.message))
    assert len(whole) > 3
    cut = chat(served, things.message, stop=[whole[2:4], "never"])
    assert text(cut) == whole[:2].strip() == streamed(served, things.message, stop=whole[2:4])
    assert cut.choices[0].finish_reason == "stop"
    one = chat(served, things.message, max_completion_tokens=1, max_tokens=None)
    assert (one.choices[0].finish_reason, one.usage.completion_tokens) == ("length", 1)


def test_streams(served, things):
    """The role first, pieces, the reason at the end, and what was used if it is asked for."""
    pieces = list(chat(served, things.message, stream=True, stream_options={"include_usage": True}))
    whole = chat(served, things.message)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [one.choices[0].finish_reason for one in pieces[:-1]] == [None] * (len(pieces) - 2) + ["stop"]
    assert pieces[-2].mmaccel["visual_tokens_kept"] == whole.mmaccel["visual_tokens_kept"]
    assert pieces[-1].usage == whole.usage and not pieces[-1].choices
    assert len({one.id for one in pieces}) == 1
    raw = served.http.post("/v1/chat/completions", json=body(stream=True, max_tokens=1))
    assert raw.headers["content-type"] == "text/event-stream" and raw.text.endswith("data: [DONE]\n\n")


def test_dice(served, things):
    """A seed gives the same answer, also when others are answered; without one answers differ; at 0 there are no dice."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    # of what it was not trained on, the model is not sure
    unsure, asked = user("what is there ?"), {"temperature": 2.0, "max_tokens": 12}
    alone = [text(chat(served, unsure, seed=seed, **asked)) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: streamed(served, unsure, seed=seed, **asked), range(4)))
    assert alone == together and len(set(alone)) > 1
    assert torch.equal(torch.get_rng_state(), before), "the dice of the process are nobody's"
    greedy = direct("mini-llava", things.prompt, "divprune").answer
    assert text(chat(served, things.message, temperature=0, seed=5)) == greedy
    assert text(chat(served, things.message, temperature=2.0, top_p=1e-6)) == greedy
    for cold in (1e-40, 1e-320, 1e-30, 1e-9):
        assert text(chat(served, unsure, temperature=cold, seed=3, max_tokens=12)) == text(
            chat(served, unsure, temperature=0, max_tokens=12)
        )


def test_the_dice_are_fair():
    logits = torch.tensor([[0.1, 0.6, 0.3, 0.0]]).log()
    dice = GumbelNoise(0)
    counts = torch.bincount(torch.cat([dice(None, logits).argmax(-1) for _ in range(4000)]), minlength=4)
    assert (counts / 4000 - logits[0].exp()).abs().max() < 0.03 and counts[3] == 0


def test_how_models_sample_by_themselves():
    """The generation config speaks where the request does not."""

    def names(config, **said):
        asked = read(json.dumps(body(**said)).encode())
        return [type(one).__name__.removesuffix("LogitsWarper") for one in sampler(SimpleNamespace(**config), asked)]

    model = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert names(model) == ["Temperature", "TopK", "TopP", "GumbelNoise"]
    assert names(model, temperature=0) == []
    assert names(model, temperature=1, top_p=1) == ["TopK", "GumbelNoise"]
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    assert names(greedy) == names(greedy, top_p=0.5) == []
    assert names(greedy, temperature=0.5, top_p=0.5) == ["Temperature", "TopP", "GumbelNoise"]


@pytest.mark.parametrize("setting", ["temperature", "top_p"])
def test_cold_texts_are_the_likeliest(setting):
    """The further down the temperature or the share of the likeliest, the surer; never another token by an overflow."""
    model = SimpleNamespace(do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
    for how in ({setting: 10.0**-n} for n in range(1, 46)):
        scores = torch.tensor([[1e3, 3.2e3, -2e3, 3.3e3, 0.0]])
        for config in (model, SimpleNamespace(**{**vars(model), **how})):
            for processor in sampler(config, read(json.dumps(body(seed=1, **how)).encode())):
                scores = processor(None, scores)
            assert scores.argmax(-1).item() == 3, how


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0", "-1e-9", "1.0000001", "1e400", '"0.5"', "true"])
def test_shares_that_are_refused(value):
    with pytest.raises(Refused, match="top_p: input should be"):
        read(json.dumps(body(top_p="@")).replace('"@"', value).encode())


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of bytes, whose tokens are parts of characters."""
    names = sorted(ByteLevel.alphabet())
    model = tokenizers.Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def pieces_of(tokenizer, said, *more, stops=()):
    """What is shown, piece by piece, of a text token by token."""
    words = Detokenizer(tokenizer, stops)
    pieces = []
    for token in [*tokenizer(said)["input_ids"], *more]:
        pieces.append(words.add([token]))
        if words.stopped:
            break
    return words, [*pieces, words.end()]


@pytest.mark.parametrize("said", ["  two words \n and a line  ", "naïve – 東京 🦆🏳️‍🌈 fin", "", " ", "🦆"])
def test_words_come_whole(letters, said):
    words, pieces = pieces_of(letters, said, letters.eos_token_id)
    assert "".join(pieces) == words.whole == said.strip() == letters.decode(words.ids, skip_special_tokens=True).strip()
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) >= len(said.split())


def test_half_a_character_at_the_end_is_shown_as_it_is(letters):
    ids = letters("a 🦆")["input_ids"][:-1]
    words = Detokenizer(letters)
    assert "".join([*(words.add([token]) for token in ids), words.end()]) == words.whole == letters.decode(ids)
    assert words.whole.startswith("a \N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("said", "stops", "left"),
    [
        ("one\ntwo", ["\n"], "one"),
        ("abcabd!", ["abd"], "abc"),
        ("ends END", ["END"], "ends"),
        ("stops here EN", ["END"], None),
    ],
)
def test_nothing_of_a_stop_sequence_is_shown(letters, said, stops, left):
    words, pieces = pieces_of(letters, said, stops=stops)
    assert "".join(pieces) == words.whole == (left or said) and words.stopped == (left is not None)
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert (left or said).startswith(shown), "what was shown is never taken back"
