"""Parameters that OpenAI or vLLM know and this device does not implement, with the values that change nothing.

A client that sends them at such a value, or null, is right; any other value is refused by name. `()` means null only.
"""

from __future__ import annotations

from typing import Any

Neutral = dict[str, tuple[Any, ...]]

NEUTRAL_SAMPLING: Neutral = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    "watermarking": (False,),
    "echo": (False,),
    "routed_experts_prompt_start": (0,),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
}
NEUTRAL_COMPLETION: Neutral = NEUTRAL_SAMPLING | {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
NEUTRAL_CHAT: Neutral = NEUTRAL_SAMPLING | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "return_prompt_text": (False,),
}
NEUTRAL_GENERATE: Neutral = {
    "features": (),
    "token_offsets": (),
    "content_parts": (),
    "reasoning_ended": (),
    "reasoning_parser_kwargs": (),
    "return_token_ids": (True,),
    "output_mode": ("tokens",),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
}
NEUTRAL_GENERATE_SAMPLING: Neutral = {
    "n": (1,),
    "stop": ([], ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "detokenize": (True, False),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "structured_outputs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": (),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "watermarking": (False,),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    "extra_args": ({},),
    "output_kind": (0, 1, 2),
    "flat_logprobs": (False,),
    "skip_reading_prefix_cache": (False,),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "truncate_prompt_tokens": (),
}
NEUTRAL_TOKENIZE: Neutral = {
    "continue_final_message": (False,),
    "chat_template": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
}
