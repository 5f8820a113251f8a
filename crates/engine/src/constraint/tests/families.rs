//! Tool calls in the formats of all families with a grammar.

/// A family: markers of its template, control tokens, valid calls, invalid calls.
pub(super) struct Case {
    pub(super) template: &'static str,
    pub(super) controls: &'static [&'static str],
    pub(super) calls: &'static [&'static str],
    pub(super) broken: &'static [&'static str],
}

const KIMI: [&str; 5] = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
];
const DEEPSEEK: [&str; 5] = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
];
const HARMONY: [&str; 7] = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
];

pub(super) const CASES: [Case; 14] = [
    Case {
        template: "<tool_call> </think>",
        controls: &[],
        calls: &[
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"<b>\", \"days\": 3}}\n</tool_call>",
            "<tool_call>{\"name\":\"run\",\"arguments\":{\"code\":\"a\\nb\"}}</tool_call>",
        ],
        broken: &[
            "<tool_call>\n{\"name\": \"other\"",
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"days\"",
            "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"x\"}}x",
        ],
    },
    Case {
        template: "<tool_call> <function= <parameter= </think>",
        controls: &[],
        calls: &[
            "<tool_call>\n<function=look>\n<parameter=city>\nKöln < 3\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=run>\n<parameter=code>\nif a:\n  b\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=look>\n<parameter=city>\nB\n</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>",
        ],
        broken: &[
            "<tool_call>\n<function=other>",
            "<tool_call>\n<function=look>\n<parameter=unit>\n",
            "<tool_call>\n<function=look>\n<parameter=city>\nx\n</parameter>\n<parameter=days>\nx",
        ],
    },
    Case {
        template: "<tool_call> <arg_key> </think>",
        controls: &[],
        calls: &[
            "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Köln < 3</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>if a:\n  <b></arg_value>\n<arg_key>not</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>run\n</tool_call>",
        ],
        broken: &[
            "<tool_call>other",
            "<tool_call>look\n<arg_key>days</arg_key>",
            "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n<arg_key>days</arg_key>\n<arg_value>x",
        ],
    },
    Case {
        template: "<minimax:tool_call> </think>",
        controls: &["<minimax:tool_call>", "</minimax:tool_call>"],
        calls: &[
            "<minimax:tool_call>\n<invoke name=\"look\">\n<parameter name=\"city\">Köln < 3</parameter>\n<parameter name=\"unit\">f</parameter>\n</invoke>\n<invoke name=\"run\">\n</invoke>\n</minimax:tool_call>",
        ],
        broken: &[
            "<minimax:tool_call>\n<invoke name=\"other",
            "<minimax:tool_call>\n<invoke name=\"look\">\n</invoke>",
            "<minimax:tool_call>\n<invoke name=\"look\">\n<parameter name=\"city\">x</parameter>\n<parameter name=\"unit\">k",
        ],
    },
    Case {
        template: "｜DSML｜ function_calls> </think>",
        controls: &[],
        calls: &[
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"look\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln\n</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ],
        broken: &[
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"other",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"look\">\n<｜DSML｜parameter name=\"days",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"look\">\n<｜DSML｜parameter name=\"city\" string=\"false",
        ],
    },
    Case {
        template: "｜DSML｜ tool_calls> </think>",
        controls: &[],
        calls: &[
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"run\">\n<｜DSML｜parameter name=\"code\" string=\"true\">a < b</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ],
        broken: &["<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"other"],
    },
    Case {
        template: "<|tool_calls_section_begin|>",
        controls: &KIMI,
        calls: &[
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{\"city\": \"<x>\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.run:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ],
        broken: &[
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.other",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        ],
    },
    Case {
        template: "<｜tool▁calls▁begin｜> ```json </think>",
        controls: &DEEPSEEK,
        calls: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\"city\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
        broken: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}",
        ],
    },
    Case {
        template: "<｜tool▁calls▁begin｜> </think>",
        controls: &DEEPSEEK,
        calls: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"city\": \"x\", \"unit\": \"c\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
        broken: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"city\": 1",
        ],
    },
    Case {
        template: "<｜tool▁calls▁begin｜>",
        controls: &[],
        calls: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{\"code\": \"<｜\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
        broken: &["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other"],
    },
    Case {
        template: "[TOOL_CALLS] [ARGS] [/THINK]",
        controls: &["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        calls: &["[TOOL_CALLS]look[ARGS]{\"city\": \"[x]\", \"days\": 2}[TOOL_CALLS]run[ARGS]{}"],
        broken: &[
            "[TOOL_CALLS]other",
            "[TOOL_CALLS]look[ARGS]{}",
            "[TOOL_CALLS][",
        ],
    },
    Case {
        template: "[TOOL_CALLS]",
        controls: &["[TOOL_CALLS]"],
        calls: &[
            "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {\"city\": \"x\"}}, {\"name\": \"run\", \"arguments\": {}}]",
            "[TOOL_CALLS] [{\"name\": \"run\", \"arguments\": {\"code\": \"]\"}}]",
        ],
        broken: &[
            "[TOOL_CALLS][{\"name\": \"other",
            "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {}",
            "[TOOL_CALLS][]",
        ],
    },
    Case {
        template: "<|python_tag|>",
        controls: &["<|python_tag|>"],
        calls: &[
            "{\"name\": \"look\", \"parameters\": {\"city\": \"{x}\", \"unit\": \"c\", \"days\": 1}}",
            "{\"name\": \"run\", \"parameters\": {}}",
        ],
        broken: &[
            "[",
            "{\"name\": \"look\", \"parameters\": []",
            "{\"name\": \"look\", \"parameters\": {\"city\": 1",
        ],
    },
    Case {
        template: "<|start|> <|channel|>",
        controls: &HARMONY,
        calls: &[
            "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"city\": \"<x>\", \"days\": 2}",
            "<|channel|>analysis<|message|>Hm: to=functions.x?<|end|><|start|>assistant<|channel|>commentary to=functions.run <|constrain|>json<|message|>{}",
            "<|channel|>commentary to=functions.run<|message|>{\"code\": \"a\"}",
        ],
        broken: &[
            "<|channel|>commentary to=functions.other",
            "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
        ],
    },
];
