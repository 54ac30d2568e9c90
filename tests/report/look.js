// Looks at the page in the frame, and writes what it finds as JSON. Colours are sRGB, boxes in CSS pixels.
document.querySelector("iframe").onload = ({ target: frame }) => {
  const view = frame.contentWindow, page = frame.contentDocument, width = frame.clientWidth;
  const name = (element) => `${element.tagName} ${element.className} ${element.textContent.trim().slice(0, 40)}`;
  const colour = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+(?:e-\d+)?/g).map(Number);
    return text.startsWith("color(") ? [r, g, b, a] : [r / 255, g / 255, b / 255, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    if (!element) return [1, 1, 1, 1];
    const own = colour(view.getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [], words = [], walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, isSeen = element.checkVisibility();
    if (!isSeen || !walker.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    texts.push(element);
    if (element.tagName !== "BUTTON") words.push(walker.currentNode.data);
  }
  const elements = [...page.body.querySelectorAll("*")].filter((one) => one.checkVisibility());
  const boxes = (selector, inside) => [...inside.querySelectorAll(selector)].map((one) => [one, one.getBoundingClientRect()]);
  const overlapping = [];
  for (const [inside, selector] of [[".area", ".label"], [".plot", ".axis, .along span, .across span"]])
    for (const plot of page.querySelectorAll(inside))
      boxes(selector, plot).forEach(([one, a], i, all) => all.slice(i + 1).forEach(([other, b]) => {
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
          overlapping.push(`${name(one)} / ${name(other)}`);
      }));
  const hidden_tips = [];
  for (const mark of [...page.querySelectorAll(".area .m")].slice(0, 20)) {
    mark.focus();
    const tip = mark.querySelector("b").getBoundingClientRect();
    if (!tip.width || tip.left < 0 || tip.right > width || tip.bottom > frame.clientHeight) hidden_tips.push(name(mark));
    mark.blur();
  }
  const table = [...page.querySelectorAll("#trials table")].at(-1);
  const first = () => table?.tBodies[0].rows[0].cells[0].textContent;
  const before = first();
  table?.querySelector("th")?.click();
  const found = {
    sections: [...page.querySelectorAll("section")].map((one) => one.id),
    requests: view.performance.getEntriesByType("resource").map((one) => one.name),
    isDark: light(behind(page.body)) < 0.2,
    scrolls: Math.max(page.documentElement.scrollWidth, page.body.scrollWidth),
    wide: elements.filter((one) => one.getBoundingClientRect().right > width + 1).map(name).slice(0, 9),
    faint: texts.map((one) => [contrast(over(colour(view.getComputedStyle(one).color), behind(one)), behind(one)), one])
      .filter(([ratio]) => ratio < 4.5).map(([ratio, one]) => `${ratio.toFixed(2)} ${name(one)}`).slice(0, 9),
    small: texts.filter((one) => parseFloat(view.getComputedStyle(one).fontSize) < 11).map(name).slice(0, 9),
    overlapping: overlapping.slice(0, 9),
    hidden_tips,
    words,
    sorted: before !== first(),
  };
  document.querySelector("pre").textContent = JSON.stringify(found);
};
