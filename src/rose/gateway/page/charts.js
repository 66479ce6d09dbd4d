"use strict";
// Small helpers to build elements, and line charts in SVG. Text from the gateway is only ever set as text.

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function fill(list, pairs) {
  const terms = pairs.map(([name, value]) => make("div", {}, make("dt", {textContent: name}), make("dd", {textContent: value})));
  list.replaceChildren(...terms);
}

function fillFacts(list, pairs) {
  list.replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", {textContent: name}), make("dd", {textContent: value})]));
}

const whole = (value) => value == null ? "?" : Math.round(value).toLocaleString("en");
const counted = (workers) => `${whole(workers)} worker${workers === 1 ? "" : "s"}`;
const ms = (seconds) => seconds == null ? "?" : `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
const share = (value) => value == null ? "?" : `${(value * 100).toFixed(0)} %`;

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A chart of one or two series over the last minutes. `format` writes a value for people.
class Chart {
  constructor(parent, title, names, format) {
    Object.assign(this, {title, names, format, times: [], series: names.map(() => []), limit: null});
    this.svg = svg("svg", {viewBox: "0 0 440 150", role: "img"});
    this.note = make("span", {className: "soft"});
    const keys = names.map((name, place) => make("span", {className: place ? "key b" : "key", textContent: name}));
    parent.append(make("figure", {}, make("figcaption", {}, make("b", {textContent: title}), ...keys, this.note), this.svg));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
  }

  show(times, series, limit = null) {
    Object.assign(this, {times, series, limit});
    this.draw();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width * 440;
    this.at = Math.round((part - 46) / 384 * (this.times.length - 1));
    this.draw();
  }

  draw() {
    const {times, series} = this;
    const known = series.flat().filter((value) => value != null);
    const top = Math.max(...known, this.limit ?? 0, 1e-9) * 1.1;
    const x = (place) => 46 + 384 * (times.length > 1 ? place / (times.length - 1) : 1);
    const y = (value) => 128 - 118 * value / top;
    const parts = [];
    for (const level of [0, 0.5, 1]) {
      const value = level * top / 1.1;
      parts.push(svg("line", {class: "grid", x1: 46, x2: 430, y1: y(value), y2: y(value)}));
      parts.push(svg("text", {x: 42, y: y(value) + 4, "text-anchor": "end"}, this.format(value)));
    }
    if (this.limit != null) parts.push(svg("line", {class: "limit", x1: 46, x2: 430, y1: y(this.limit), y2: y(this.limit)}));
    series.forEach((values, place) => {
      let path = "", isDown = false;
      values.forEach((value, index) => {
        if (value == null) { isDown = false; return; }
        path += `${isDown ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
        isDown = true;
      });
      parts.push(svg("path", {class: place ? "b" : "a", d: path || "M0 0"}));
    });
    const span = times.length > 1 ? times[times.length - 1] - times[0] : 0;
    parts.push(svg("text", {x: 46, y: 146}, span ? `${Math.round(span)} s ago` : ""));
    parts.push(svg("text", {x: 430, y: 146, "text-anchor": "end"}, "now"));
    const at = this.at != null && this.at >= 0 && this.at < times.length ? this.at : times.length - 1;
    if (this.at != null && at === this.at) parts.push(svg("line", {class: "cross", x1: x(at), x2: x(at), y1: 10, y2: 128}));
    const words = this.names.map((name, place) => `${name} ${series[place][at] == null ? "?" : this.format(series[place][at])}`);
    this.note.textContent = words.join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
    this.svg.replaceChildren(...parts);
  }
}
