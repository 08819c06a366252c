"""What the words of a page mean."""

GLOSSARY = (
    ("Average incremental accuracy", "Mean over stages of the accuracy over all classes seen by then."),
    (
        "Forgetting",
        "For every task but the last one's: its best accuracy before the last stage minus its accuracy at the end; the "
        "mean over those tasks, in percentage points (pp). Lower is better.",
    ),
    (
        "Backward transfer",
        "Accuracy of a task at the end minus its accuracy when it arrived; the mean over all tasks but the last one's. "
        "Above zero, later tasks helped earlier ones.",
    ),
    (
        "Clients, worst 10 %",
        "The global or personal model's expected accuracy on each client's own mix of classes; the mean over the tenth "
        "of the clients (at least one) where it is lowest.",
    ),
    (
        "95 % interval",
        "Student's t over seeds: 95 of 100 such intervals hold the mean of many more seeds. It takes two seeds or "
        "more, is wide for few, and is not cut off at 0 or 100 %.",
    ),
    (
        "Pareto front",
        "The runs or methods that no other beats in both accuracy and cost; what pools all data is left out. FLOPs of "
        "training are an estimate: sample visits times three passes forward.",
    ),
    (
        "Training loss",
        "Mean of the objective that clients minimise, with all terms of the method. A term that rewards entropy, such "
        "as the balance term of a gate, can take it below zero.",
    ),
    (
        "Perplexity",
        "exp of the mean negative log-likelihood of the right option's tokens, on the test examples. Lower is better.",
    ),
    (
        "Alignment",
        "How much closer pictures are to the text of their class than to those of the other classes seen, on the test "
        "examples: the mean cosine with the former (matched cosine) minus the mean cosine with the latter.",
    ),
)
