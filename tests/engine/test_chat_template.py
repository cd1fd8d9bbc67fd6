"""Do chat templates give what transformers gives, safely, and are their refusals the request's errors? (C17)"""

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from engine.text import template_sandbox
from engine.text.chat_template import MAX_DEPTH, ChatTemplate, named_templates
from engine.text.sources import read_text_files
from engine.text.tokenizer import Tokenizer
from ipc.errors import RequestError
from tests.chat_styles import CONVERSATIONS, MARKERS, STYLES
from tests.chat_styles import TOOLS as TWO_TOOLS
from tests.tiny import byte_vocabulary, write_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße,\n  日本"},
    {"role": "assistant", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [True, None]}}}]},
    {"role": "user", "content": "bye"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<f> & é", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] + ': ' + m.content + eos_token }}\n{% endfor %}",
    "blocks and blanks": """
{%- for message in messages %}
    {% if message.role == 'system' %}
        [{{ message.content | trim }}]
    {% else %}
    {{ bos_token }}{{ message.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}""",
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[2].tool_calls | tojson(sort_keys=true) }}{{ messages[0] | tojson }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "missing": "{{ messages[0].nothing }}|{{ tools is none }}|{{ documents is defined }}|{{ custom }}|{{ pad_token is defined }}|{{ messages[0].get('x', 'y') }}",
    "slices": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% endif %}{{ rest | length }}{{ rest[0].content.split('\n')[0] | upper }}",
    "llama 2": "{% for message in messages %}{% if (message['role'] == 'user') %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equal_to_transformers(name: str, add_generation_prompt: bool, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    [expected], _ = render_jinja_template([TALK], chat_template=TEMPLATES[name], custom="c", **arguments, **SPECIAL)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(TALK, custom="c", **arguments) == expected


class Both:
    """One tokenizer, read by us and by transformers."""

    def __init__(self, folder: Path) -> None:
        import transformers

        vocabulary = byte_vocabulary(300)
        for index, marker in enumerate(MARKERS):
            vocabulary[marker] = 300 + index
        write_tokenizer(
            folder, vocabulary, merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>", **{f"m{i}": m for i, m in enumerate(MARKERS)}
        )
        document = json.loads((folder / "tokenizer.json").read_text())
        document["post_processor"] = {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocabulary["<s>"]], "tokens": ["<s>"]}},
        }  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(document))
        self.bos_id = vocabulary["<s>"]
        self.theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        files = read_text_files(str(folder))
        self.ours = Tokenizer(files.tokenizer, files.tokenizer_config)

    def expected(self, source: str, messages: Any, **arguments: Any) -> tuple[str, list[int]] | None:
        """Text and ids by transformers; None where the template refuses."""
        try:
            text = self.theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
        except jinja2.TemplateError:
            return None
        ids = self.theirs.apply_chat_template(messages, chat_template=source, tokenize=True, return_dict=False, **arguments)
        return text, ids

    def found(self, source: str, messages: Any, **arguments: Any) -> tuple[str, list[int]] | None:
        """The same by us."""
        try:
            text = ChatTemplate(source, self.ours.special_tokens).render(messages, **arguments)
        except RequestError as error:
            assert (error.field, error.code) == ("messages", "bad_request")
            return None
        return text, self.ours.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_c17_six_styles_equal_transformers(both: Both, style: str, conversation: str) -> None:
    if conversation == "parts" and style not in ("gemma", "qwen"):
        pytest.skip("transformers writes the list out, or fails; see below for what we do")
    for tools in (None, TWO_TOOLS):
        for add in (True, False):
            arguments = {"tools": tools, "add_generation_prompt": add}
            expected = both.expected(STYLES[style], CONVERSATIONS[conversation], **arguments)
            assert both.found(STYLES[style], CONVERSATIONS[conversation], **arguments) == expected
            if expected is not None:
                assert expected[1].count(both.bos_id) == ("bos_token" in STYLES[style]) + ("<s>" in str(CONVERSATIONS[conversation]))


def test_every_style_answers_and_some_refuse(both: Both) -> None:
    """The test above is not one of refusals."""
    refused = {
        (style, name) for style, source in STYLES.items() for name, messages in CONVERSATIONS.items()
        if name != "parts" and both.found(source, messages) is None
    }  # fmt: skip
    assert refused == {
        ("llama 3", "two calls"), ("mistral", "roles out of turn"), ("mistral", "another role"), ("gemma", "roles out of turn"),
        ("gemma", "a tool was called"), ("gemma", "two calls"), *{("gemma", n) for n in ()},
    }  # fmt: skip


def test_c17_the_demo_models_own_template(demo_model: Path) -> None:
    """Text only; its ids are among the golden ones."""
    from transformers.utils.chat_template_utils import render_jinja_template

    files = read_text_files(str(demo_model))
    template = ChatTemplate(files.chat_template, json.loads(files.tokenizer_config))
    for name, messages in CONVERSATIONS.items():
        if name in ("parts", "a tool was called"):  # content that is no text: the template fails for transformers, too
            continue
        for add in (True, False):
            [expected], _ = render_jinja_template([messages], chat_template=files.chat_template, add_generation_prompt=add)
            assert template.render(messages, add_generation_prompt=add) == expected


@pytest.mark.parametrize("style", ["llama 3", "mistral", "tool user"])
def test_parts_of_text_become_one_text_for_templates_that_take_texts_only(both: Both, style: str) -> None:
    def chat(content: Any) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "S"}, {"role": "user", "content": content}]

    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert both.found(STYLES[style], chat(parts)) == both.found(STYLES[style], chat("first\nsecond"))


def test_parts_that_are_no_text_are_left_to_the_template(both: Both) -> None:
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert both.found(STYLES["gemma"], image) == both.expected(STYLES["gemma"], image, add_generation_prompt=True)
    assert both.found(STYLES["mistral"], image) is None


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    import transformers

    write_tokenizer(tmp_path, byte_vocabulary(280), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"default": "plain {{ messages | length }}", "tool_use": "tools {{ tools | length }}", "rag": "x"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = read_text_files(str(tmp_path))
    assert named_templates(files.tokenizer_config) == named
    ours = ChatTemplate(files.chat_template, {}, named_templates(files.tokenizer_config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert ours.render(TALK, tools=tools) == expected

    (tmp_path / "chat_template.jinja").write_text("from its file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools, from its file")
    files = read_text_files(str(tmp_path))
    assert files.chat_template == "from its file"
    assert named_templates(files.tokenizer_config) == {"default": "from its file", "tool_use": "for tools, from its file"}


def test_a_model_with_named_templates_only_says_which() -> None:
    template = ChatTemplate(None, {}, {"tool_use": "t", "rag": "r"})
    assert template.render(TALK, tools=TOOLS) == "t"
    with pytest.raises(RequestError, match="no chat template; it has named ones only: rag, tool_use"):
        template.render(TALK)
    assert named_templates(b"{}") == named_templates(b'{"chat_template": "x"}') == named_templates(b"[]") == {}


def test_keys_that_are_none_are_left_out_as_in_transformers() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", {})
    assert template.render([{"role": "assistant", "content": None, "name": None}]) == '{"role": "assistant"}'


def test_reasoning_is_found_under_each_of_its_names() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", {})
    for name in ("reasoning", "thinking", "reasoning_content"):
        assert template.render([{"role": "assistant", name: "hm"}]) == "hmhm"


def test_the_date_of_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TALK) == str(datetime.now().year)


def test_variables_win_over_special_tokens_but_not_over_the_messages() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", SPECIAL)
    assert template.render(TALK, bos_token="X") == "X4"


# -------------------------------------------------------------------------------------------------------- refusals


def refused(template: str | None, messages: Any = TALK, **variables: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(template, SPECIAL).render(messages, **variables)
    return caught.value


def test_a_missing_template_is_explained() -> None:
    error = refused(None)
    assert (error.field, error.code) == ("messages", "bad_request")
    assert "no chat template" in error.reason and "generate" in error.reason


def test_a_broken_template_is_not_the_clients_fault() -> None:
    error = refused("{% for m in %}")
    assert error.code == "internal" and "broken" in error.reason


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content + 1 }}", "refused"),
        ("{{ messages.nothing.more }}", "no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ {}['a'].b }}", "no attribute 'a'"),
    ],
)
def test_what_a_template_refuses_is_the_requests_error(template: str, words: str) -> None:
    error = refused(template)
    assert error.field == "messages" and words in error.reason


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ''.format.__self__.x }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(message) for message in TALK]
    assert "refused" in refused(template, messages).reason
    assert messages == TALK


@pytest.mark.parametrize("template", [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '{}'.format(ns.x) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x, range(100000) | list] %}{% endfor %}",
    "{% set b = range(100000) | list %}{% set ns = namespace(x=[]) %}{% for i in b %}{% set ns.x = [ns.x, b[:]] %}{% endfor %}",
    "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'x' * 10000000000 }}", "{{ [1] * 10000000000 }}", "{{ 10000000000 * 'x' }}", "{{ 9 ** (9 ** 9) }}", "{{ 7 ** 1000000000 }}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x'.center(10000000000) }}", "{{ 'x' | center(10000000000) }}", "{{ 'x'.ljust(9999999999) }}", "{{ '7'.zfill(9999999999) }}",
    "{{ '\\t'.expandtabs(9999999999) }}", "{{ '%9999999999d' % 1 }}", "{{ '%*d' % (9999999999, 1) }}", "{{ '%9999999999d' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}", "{{ '{:{}}'.format(1, 9999999999) }}", "{{ '{:.9999999999f}'.format(1.5) }}",
    "{{ 'x' | indent(9999999999, true) }}", "{{ [1] | tojson(indent=9999999999) }}", "{{ [1] | batch(9999999999, 'x') | list }}",
    "{{ [1] | slice(9999999999) | list }}", "{{ ('x' * 10000).replace('', 'y' * 10000) }}", "{{ ('x' * 10000) | replace('x', 'y' * 10000) }}",
    "{{ ('y' * 10000).join('x' * 10000) }}", "{{ ('x' * 10000) | join('y' * 10000) }}", "{{ (['x' * 10000] * 10000) | join }}",
    "{{ ''.join(['x' * 10000] * 10000) }}", "{{ ['x' * 10000] * 10000 }}", "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
    "{{ ('x\\n' * 10000) | indent('y' * 10000) }}", "{{ lipsum(n=1000000000) }}", "{{ strftime_now('%9999999999Y') }}",
    "{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
])  # fmt: skip
def test_a_template_that_would_never_end_or_fill_the_memory_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import time

    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    monkeypatch.setattr(template_sandbox, "MAX_ROUNDS", template_sandbox.MAX_ROUNDS // 50)
    monkeypatch.setattr(template_sandbox, "MAX_CPU_S", 1.0)
    assert refused(template).field == "messages"
    assert time.thread_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


@pytest.mark.parametrize("template", [
    "{{ '%s and %5.2f%%' % ('a', 1.5) }}{{ '%s' | format('x') }}{{ '{:>5} {}'.format(1, 'b') }}", "{{ '** %s **' % 'bold' }}", "{{ 7 % 3 }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'x' * 3 }}{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ 2 ** 10 }}{{ 1700000000 * 1000 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}",
    "{{ ', '.join(messages | map(attribute='role')) }}{{ messages | map(attribute='role') | join('-') }}{{ 'abc' | join('.') }}",
    "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:-1:2] }}{{ messages[-1].content[:2] }}",
    "{{ ' a\n b' | indent(4, true) }}{{ messages | tojson(indent=2) }}{{ 'x' | center(9) }}{{ 'a b' | replace(' ', '_') }}{{ 'x'.ljust(4) }}",
    "{% for group in messages | batch(2, 'none') %}{{ group | length }}{% endfor %}{{ messages | groupby('role') | length }}",
    "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{% call m(1) %}in{% endcall %}{{ m(2) }}",
    "{% for i in range(3) recursive %}{{ loop.index }}{{ loop([9]) if i == 1 }}{% endfor %}", "{{ namespace(a=1).a }}{{ dict(b=2).b }}{{ dict([('c', 3)]) }}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}{{ joiner is defined }}{{ cycler is defined }}",
    "{% set text %}block {{ 1 }}{% endset %}{{ text }}{{ text | upper }}{% filter trim %} x {% endfilter %}", "{{ none }}{{ true }}{{ {} }}{{ [none] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | sum(start=0, attribute='missing') if false else 'no' }}",
])  # fmt: skip
def test_limits_change_nothing_for_honest_templates(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    [expected], _ = render_jinja_template([TALK], chat_template=template)
    assert ChatTemplate(template, {}).render(TALK, add_generation_prompt=False) == expected


def test_a_long_conversation_is_within_the_limits() -> None:
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(2_001)]
    text = ChatTemplate(STYLES["mistral"], SPECIAL).render(talk)
    assert len(text) > 2_000_000


def test_threads_have_accounts_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}{{ messages[0].content }}", {})
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(template.render([{"role": "user", "content": str(i)}])))  # type: ignore[misc]
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(map(str, range(8)))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message, got none"),
        ("hi", "must be a list of at least one message, got str"),
        (None, "got NoneType"),
        (["hi"], r"messages[0] must be a map with role and content, got str"),
        ([{"content": "x"}], "messages[0].role=None must be a text"),
        ([TALK[0], {"role": 3}], "messages[1].role=3 must be a text"),
        ([{"role": "user", "content": b"x"}], "messages[0].content must be text, number, list or map, got bytes"),
        ([{"role": "user", "content": [{"a": object()}]}], "messages[0].content[0].a must be"),
        ([{"role": "user", 3: 4}], "messages[0] has the key 3"),
    ],
)
def test_messages_of_the_wrong_form_are_named(messages: Any, words: str) -> None:
    error = refused("x", messages)
    assert error.field == "messages" and words in error.reason


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    assert "nested more than" in refused("x", [{"role": "user", "content": deep}]).reason
