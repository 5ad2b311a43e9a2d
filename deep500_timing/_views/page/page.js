"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  // Expressions are interpreted: the page forbids code out of texts. The tooltip escapes what it shows.
  const options = () => ({
    actions: false, renderer: "svg", ast: true, tooltip: {theme: dark.matches ? "dark" : "light"},
  });

  async function draw(place) {
    const element = document.getElementById(`chart-${place}`);
    try {
      const {view} = await vegaEmbed(element, specs[place], options());
      // The chart's container says what it shows; its marks one by one would say less.
      element.querySelector("svg").setAttribute("aria-hidden", "true");
      views.set(place, view);
      element.dataset.drawn = "yes";
    } catch (error) {
      element.dataset.drawn = "no";
      element.textContent = `This chart could not be drawn: ${error.message}. Its numbers are below.`;
    }
  }

  // The selection "zoom" of a chart holds the two ends of its x axis in a signal of the field's name.
  function zoom(place, how) {
    const view = views.get(place);
    const name = Object.keys(view.getState().signals).find((signal) => /^zoom_(?!x$|y$|tuple|toggle|modify|translate|zoom)/.test(signal));
    const whole = specs[place].whole || (specs[place].whole = view.scale("x").domain().map(Number));
    if (how === "all") {
      view.signal(name, null);
      return view.runAsync();
    }
    const [low, high] = view.scale("x").domain().map(Number);
    const width = high - low, middle = (low + high) / 2;
    let next = {
      in: [middle - width / 4, middle + width / 4], out: [middle - width, middle + width],
      left: [low - width / 4, high - width / 4], right: [low + width / 4, high + width / 4],
    }[how];
    const most = whole[1] - whole[0];
    if (next[1] - next[0] >= most) next = whole;
    else if (next[0] < whole[0]) next = [whole[0], whole[0] + next[1] - next[0]];
    else if (next[1] > whole[1]) next = [whole[1] - (next[1] - next[0]), whole[1]];
    view.signal(name, next);
    return view.runAsync();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-zoom]");
    if (button) zoom(Number(button.parentElement.dataset.chart), button.dataset.zoom);
    const copy = event.target.closest("button[data-copy]");
    if (!copy) return;
    // A page that is opened as a file may not have the newer clipboard.
    window.getSelection().selectAllChildren(copy.previousElementSibling);
    if (document.execCommand("copy")) copy.textContent = "Copied";
  });

  (async () => {
    for (let place = 0; place < specs.length; place += 1) await draw(place);
    document.documentElement.dataset.drawn = "yes";
  })();
})();
