// What the search of the site answers, by the theme's own program, which a browser runs as a worker:
//
//     node search_site.js WORKER.js search_index.json < questions.json
//
// prints, as JSON, for each question the pages in their order, each with the places on it and their scores.
const fs = require("fs");
const vm = require("vm");

const [worker, index] = process.argv.slice(2);
let handle;
let reply;
const scope = {
  addEventListener: (_, handler) => { handle = handler; },
  postMessage: (message) => { reply(message.data); },
  Element: class {},
  console,
};
scope.self = scope;
vm.runInContext(fs.readFileSync(worker, "utf8"), vm.createContext(scope));

const ask = (type, data) => new Promise((resolve) => { reply = resolve; handle({ data: { type, data } }); });

(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await ask(0, { config, docs, options: {} });
  const answers = {};
  for (const question of JSON.parse(fs.readFileSync(0, "utf8"))) {
    answers[question] = (await ask(2, question)).items.map((page) => page.map((place) => [place.location, place.score]));
  }
  console.log(JSON.stringify(answers));
})();
