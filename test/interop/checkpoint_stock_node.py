"""A stock vLLM that generates greedily from a checkpoint, in a process of its own, driven by JSON lines.

Usage: checkpoint_stock_node.py

One line in, one line out:

    ["load", DIR]             from now on this checkpoint, computed in float32
    ["generate", prompts, n]  each prompt is token ids; per prompt n [token, its log-probability, the second best's]
    ["encode", texts]         token ids of each text, as the completions API makes them of a prompt
    ["decode", tokens]        the text of each answer, as the API shows it
    ["chat", messages]        token ids of the prompt that the chat API makes of them
    ["rewrite", DIR, dtype]   writes the same model and tokenizer with the stock library
    ["make", DIR, dtype, config, seed]  writes another, with random weights and the same tokenizer
"""
import json
import logging
import os
import sys

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Stock:
    llm = None

    def load(self, path):
        import gc
        from vllm import LLM
        self.llm = None  # its memory first
        gc.collect()
        self.path = path
        self.llm = LLM(model=path, dtype="float32", enforce_eager=True, enable_prefix_caching=False, seed=0,
                       max_num_seqs=8)
        self.tokenizer = self.llm.get_tokenizer()

    def generate(self, prompts, n):
        from vllm import SamplingParams
        how = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
        return [[self.step(*step) for step in zip(a.outputs[0].token_ids, a.outputs[0].logprobs)] for a in answers]

    @staticmethod
    def step(token, choices):
        second = max(c.logprob for t, c in choices.items() if t != token)
        return [token, choices[token].logprob, second]

    def encode(self, texts):
        return [self.tokenizer.encode(t) for t in texts]

    def decode(self, answers):
        return [self.tokenizer.decode(a, skip_special_tokens=True) for a in answers]

    def chat(self, messages):
        from vllm import SamplingParams
        answers = self.llm.chat([messages], SamplingParams(max_tokens=1), use_tqdm=False)
        return answers[0].prompt_token_ids

    def rewrite(self, path, dtype):
        import torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=getattr(torch, dtype))
        model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def make(self, path, dtype, config, seed):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype)).save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def main():
    logging.disable(logging.WARNING)
    stock = Stock()
    for line in sys.stdin:
        command, *args = json.loads(line)
        try:
            answer = {"ok": getattr(stock, command)(*args)}
        except Exception as e:  # the test says what it expected instead
            answer = {"error": repr(e)}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # without the destructors of the bundled libraries, some of which crash


main()
