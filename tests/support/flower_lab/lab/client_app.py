"""A small app of Flower as its documentation writes them; it knows nothing of us."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from sklearn.datasets import load_digits

app = ClientApp()


def load_data(context: Context):
    """Its training and held-out digits; they never leave this machine."""
    first, cut = context.run_config["data.first"], context.run_config["data.held-out"]
    pixels, classes = load_digits(return_X_y=True)
    inputs, targets = pixels[first:] / 16, np.eye(10)[classes[first:]]
    return (inputs[cut:], targets[cut:]), (inputs[:cut], targets[:cut])


def predict(inputs: NDArray, weight: NDArray, bias: NDArray):
    """Probabilities of the ten classes."""
    scores = inputs @ weight.T + bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def loss_of(probabilities: NDArray, targets: NDArray):
    """Mean cross-entropy."""
    return float(-np.log((probabilities * targets).sum(axis=1)).mean())


@app.train()
def train(msg: Message, context: Context):
    """Take steps of gradient descent over all its digits."""
    weight, bias = msg.content["arrays"].to_numpy_ndarrays()
    weight, bias = weight.copy(), bias.copy()
    (inputs, targets), _ = load_data(context)
    lr = msg.content["config"]["lr"]
    for _ in range(context.run_config["local-epochs"]):
        probabilities = predict(inputs, weight, bias)
        error = (probabilities - targets) / len(inputs)
        weight -= lr * (error.T @ inputs)
        bias -= lr * error.sum(axis=0)
    metrics = {
        "num-examples": len(inputs),
        "train_loss": loss_of(probabilities, targets),
        "round": msg.content["config"]["server-round"],
    }
    content = RecordDict(
        {"arrays": ArrayRecord([weight, bias]), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on what is held out."""
    weight, bias = msg.content["arrays"].to_numpy_ndarrays()
    _, (inputs, targets) = load_data(context)
    probabilities = predict(inputs, weight, bias)
    right = probabilities.argmax(axis=1) == targets.argmax(axis=1)
    metrics = {
        "num-examples": len(inputs),
        "eval_loss": loss_of(probabilities, targets),
        "eval_acc": float(right.mean()),
    }
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
