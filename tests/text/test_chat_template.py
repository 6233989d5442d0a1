"""Chat templates: our sandbox against transformers' own renderer, and what is refused."""

import json

import pytest

from minifer.text.chat_template import ChatTemplate, check_messages

transformers_templates = pytest.importorskip("transformers.utils.chat_template_utils")

# The template SmolLM2-Instruct ships: ChatML with a default system message.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Llama 3: writes BOS itself, trims contents, dates the system message.
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant may speak, not " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- generation %}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# In the manner of Qwen: tools as JSON, tool calls, tool answers grouped, block tags on own lines.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
    {%- if message.role == "debug" %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# In the manner of older templates: no dashes, the environment removes the blanks around tags.
INDENTED = """{% for message in messages %}
    {% if message.role == 'user' %}
[INST] {{ message.content }} [/INST]
    {% else %}
 {{ message.content }}</s>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{ 'Answer:' }}
{% endif %}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen": QWEN, "indented": INDENTED}

USER = {"role": "user", "content": "What is 2 < 3 & 'so'?"}
ANSWER = {"role": "assistant", "content": "  Yes: 2 < 3.\n"}
CHATS = {
    "one user": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "Désolé, 你好 🙂\n\n"}],
    "ends with assistant": [USER, ANSWER],
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <b>", "days": 2}},
}
TOOL_CHAT = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "windy"},
    {"role": "debug", "content": "left out"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It's <now> & é"}}]


def of_transformers(template, messages, **kwargs):
    rendered, _ = transformers_templates.render_jinja_template(
        conversations=[messages], chat_template=template, **kwargs
    )
    return rendered[0]


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name, chat, generation_prompt):
    kwargs = {"add_generation_prompt": generation_prompt, "bos_token": "<s>"}
    ours = ChatTemplate(TEMPLATES[name]).render(CHATS[chat], **kwargs)
    assert ours == of_transformers(TEMPLATES[name], CHATS[chat], **kwargs)
    assert CHATS[chat][0]["content"].strip() in ours


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_is_left_open_as_transformers_leaves_it(name):
    kwargs = {"add_generation_prompt": False, "continue_final_message": True, "bos_token": "<s>"}
    chat = CHATS["ends with assistant"]
    ours = ChatTemplate(TEMPLATES[name]).render(chat, **kwargs)
    assert ours == of_transformers(TEMPLATES[name], chat, **kwargs)
    # Llama 3 trims the content, the others keep its blanks: the open end is what was rendered.
    assert ours.endswith("Yes: 2 < 3." if name == "llama3" else "  Yes: 2 < 3.\n")


def test_tools_calls_and_answers_render_as_in_transformers():
    for variables in ({}, {"enable_thinking": False}):
        kwargs = {"tools": TOOLS, "add_generation_prompt": True, **variables}
        ours = ChatTemplate(QWEN).render(TOOL_CHAT, **kwargs)
        assert ours == of_transformers(QWEN, TOOL_CHAT, **kwargs)
    assert "It's <now> & é" in ours  # no HTML escapes, no \u00e9


def test_tool_arguments_sent_as_json_text_render_like_the_object():
    call = {**CALL, "function": {**CALL["function"]}}
    call["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    same = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert ChatTemplate(QWEN).render(chat) == ChatTemplate(QWEN).render(same)
    call["function"]["arguments"] = "{not json"
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        check_messages(chat)


def test_text_parts_are_joined_with_a_newline():
    parts = [{"type": "text", "text": "a"}, "b"]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_checking_leaves_the_callers_messages_alone():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    copy = json.loads(json.dumps(chat))
    assert "name" not in check_messages(chat)[0]
    ChatTemplate(SMOLLM2).render([*chat, ANSWER], add_generation_prompt=False)
    assert chat == copy


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages must be a non-empty list"),
        ("hi", "messages must be a non-empty list"),
        ({"role": "user", "content": "hi"}, "messages must be a non-empty list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "hi"}], r"messages\[1\].role"),
        ([{"role": "", "content": "hi"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] needs a function"),
    ],
)
def test_bad_messages_are_refused_by_index(messages, said):
    with pytest.raises(ValueError, match=said):
        ChatTemplate(SMOLLM2).render(messages)


def test_case_117_both_flags_or_a_last_message_of_the_user_are_refused():
    template = ChatTemplate(SMOLLM2)
    with pytest.raises(ValueError, match="exclude each other"):
        template.render([USER, ANSWER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ValueError, match="got role 'user'"):
        template.render([USER], continue_final_message=True, add_generation_prompt=False)


def test_a_template_that_drops_the_continued_message_is_named():
    with pytest.raises(ValueError, match="does not render the last message"):
        ChatTemplate("{{ messages[0].content }}").render(
            [USER, ANSWER], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='system') %}",
    ],
)
def test_a_template_that_reaches_for_python_is_refused_by_the_sandbox(source):
    with pytest.raises(ValueError, match="refused by the sandbox"):
        ChatTemplate(source).render([USER])


def test_template_errors_are_one_sentence():
    with pytest.raises(ValueError, match="does not compile: line 2"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(ValueError, match="Only user and assistant may speak, not tool"):
        ChatTemplate(LLAMA3).render([{"role": "tool", "content": "x"}], bos_token="<s>")
    with pytest.raises(ValueError, match="failed with TypeError"):
        ChatTemplate("{{ 'a' + 1 }}").render([USER])
    with pytest.raises(ValueError, match="failed with ZeroDivisionError"):
        ChatTemplate("{{ 1 // 0 }}").render([USER])
    with pytest.raises(ValueError, match=r"chat template: .*undefined"):
        ChatTemplate("{{ missing.field }}").render([USER])


def test_strftime_now_gives_todays_date():
    from datetime import datetime

    before = datetime.now().strftime("%d %b %Y")
    shown = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render([USER])
    assert shown in (before, datetime.now().strftime("%d %b %Y"))
