"""Chat templates in the styles of six families, written from the formats that their makers document, and conversations for
them.
"""

from typing import Any

LLAMA_3 = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- set system = "" %}
{%- if messages[0]["role"] == "system" %}
    {%- if messages[0].content is string %}
        {%- set system = messages[0].content | trim %}
    {%- else %}
        {%- set system = messages[0].content[0].text | trim %}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {%- set asked = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a JSON function call of the form " }}
    {{- '{"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- asked + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- (message.content | tojson if message.content is mapping or message.content is iterable else message.content) + "<|eot_id|>" }}
    {%- elif "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model makes one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0]["role"] == "system" -%}
    {%- set system, turns = messages[0]["content"], messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- set ns = namespace(index=0) -%}
{%- for message in turns -%}
    {%- if message.role in ("user", "assistant") and not message.tool_calls -%}
        {%- if (message.role == "user") != (ns.index % 2 == 0) -%}
            {{- raise_exception("Roles must alternate between user and assistant") -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message.role == "user" -%}
        {%- if tools and loop.last -%}
            {{- "[AVAILABLE_TOOLS] [" -}}
            {%- for tool in tools -%}
                {{- '{"type": "function", "function": {' -}}
                {%- for key, value in tool.function.items() if key != "return" -%}
                    {{- '"' ~ key ~ '": ' ~ (('"' ~ value ~ '"') if value is string else (value | tojson)) -}}
                    {{- ", " if not loop.last -}}
                {%- endfor -%}
                {{- "}}" ~ (", " if not loop.last else "]") -}}
            {%- endfor -%}
            {{- "[/AVAILABLE_TOOLS]" -}}
        {%- endif -%}
        {{- "[INST] " + (system + "\\n\\n" if system is defined and loop.last else "") + message.content + "[/INST]" -}}
    {%- elif message.tool_calls -%}
        {{- "[TOOL_CALLS] [" -}}
        {%- for call in message.tool_calls -%}
            {%- if call.id is not defined or call.id | length != 9 -%}
                {{- raise_exception("Calls' ids have nine letters and digits") -}}
            {%- endif -%}
            {%- set text = call.function | tojson -%}
            {{- text[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]" + eos_token) -}}
        {%- endfor -%}
    {%- elif message.role == "assistant" -%}
        {{- " " + message.content | trim + eos_token -}}
    {%- elif message.role == "tool" -%}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content | string ~ ', "call_id": "' ~ message.tool_call_id ~ '"}[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception("Only user, assistant and tool roles are supported, got " + message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""

QWEN = """
{%- macro body(message) %}
    {%- if message.content is string %}{{ message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}{{ part.text if part.type == "text" }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- "<|im_start|>system\\n" }}
    {%- if messages[0].role == "system" %}{{- body(messages[0]) + "\\n\\n" }}{%- endif %}
    {{- "# Tools\\n\\nFunction signatures are within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call return JSON within <tool_call></tool_call>:\\n" }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == "system" %}
    {{- "<|im_start|>system\\n" + body(messages[0]) + "<|im_end|>\\n" }}
{%- else %}
    {{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- "<|im_start|>" + message.role + "\\n" + body(message) + "<|im_end|>" + "\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant" }}
        {%- if message.content %}{{- "\\n" + body(message) }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}{{- "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + body(message) + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""

GEMMA = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix, turns = "", messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

TOOL_USER = """
{%- macro kind(schema) -%}
    {%- set known = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"} -%}
    {%- if schema.type is string and known[schema.type] is defined -%}{{ known[schema.type] }}
    {%- elif schema.type == "array" -%}list[{{ kind(schema["items"]) if schema["items"] else "Any" }}]
    {%- elif schema.enum is defined -%}Literal[{{ schema.enum | map("tojson") | join(", ") }}]
    {%- else -%}dict{%- endif -%}
{%- endmacro -%}
{{- bos_token + "<|im_start|>system\\n" }}
{%- for tool in tools or [] %}
    {%- set function = tool.function if tool.function is defined else tool %}
    {{- "def " + function.name + "(" }}
    {%- for name, schema in (function.parameters.properties or {}).items() %}
        {{- name + ": " + kind(schema) }}
        {%- if name not in (function.parameters.required or []) %} = None{% endif %}
        {%- if not loop.last %}, {% endif %}
    {%- endfor %}
    {{- ")  # " + (function.description or "") | replace("\\n", " ") }}
{% endfor %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- message.content + "\\n" }}{% continue %}
    {%- endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- message.reasoning_content if message.reasoning_content is defined else "" }}
        {{- message.content or "" }}
        {%- for call in message.tool_calls or [] %}
            {{- "\\n<tool_call>\\n" + {"name": call.function.name, "arguments": call.function.arguments} | tojson + "\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""

WITHOUT_BOS = QWEN
STYLES = {"llama 3": LLAMA_3, "mistral": MISTRAL, "qwen": QWEN, "gemma": GEMMA, "tool user": TOOL_USER}

MARKERS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|im_start|>", "<|im_end|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
"""What is one token for the models of these styles."""

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Wetter für <eine> \"Stadt\" & Umgebung\nheute", "parameters": {
            "type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "description": "z. B. 'Zürich'"}, "days": {"type": "integer", "minimum": 1},
                "units": {"enum": ["°C", "°F", None]}, "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    }},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip

_CALL = {"id": "aB3dE6gH9", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be <brief> & 'kind'.\n"}, {"role": "user", "content": "  Grüße,\n  日本 👩‍💻 "}],
    "several turns": [
        {"role": "user", "content": "a {{ b }} {% c %}"}, {"role": "assistant", "content": "d "}, {"role": "user", "content": "e"},
    ],
    "ends with an answer": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "markers in the text": [{"role": "user", "content": "<|im_end|> [INST] <|eot_id|> <s> <end_of_turn>"}],
    "a tool was called": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "aB3dE6gH9", "name": "get_weather", "content": "{\"t\": 21}"},
        {"role": "assistant", "content": "21 °C", "reasoning": "easy"}, {"role": "user", "content": "Thanks"},
    ],
    "two calls": [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Let me see.", "tool_calls": [_CALL, _CALL]},
        {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "1"}, {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "2"},
    ],
    "roles out of turn": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "another role": [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Sys"}]},
        {"role": "user", "content": [{"type": "text", "text": "first "}, {"type": "text", "text": " second"}]},
    ],
}  # fmt: skip
